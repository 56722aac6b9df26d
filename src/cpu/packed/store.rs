//! The bytes of packed weights: memory of their own, or a part of a file that is mapped.

use memmap2::Mmap;
use std::ops::Range;
use std::sync::Arc;

/// A cache line, the alignment of packed weights.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(super) struct Line([u8; 64]);

impl Line {
    pub const ZERO: Self = Self([0; 64]);
}

/// Where packed weights lie.
#[derive(Clone)]
pub(super) enum Store {
    Own(Vec<Line>),
    Mapped(Arc<Mmap>, Range<usize>),
}

impl Store {
    pub fn own(lines: Vec<Line>) -> Self {
        Store::Own(lines)
    }

    pub fn bytes(&self) -> &[u8] {
        match self {
            // SAFETY: a line is 64 plain bytes without padding.
            Store::Own(lines) => unsafe {
                std::slice::from_raw_parts(lines.as_ptr().cast(), 64 * lines.len())
            },
            Store::Mapped(map, range) => &map[range.clone()],
        }
    }
}
