//! Ternary products of a single token. Where 128 activations have one scale, and as many weights, the sum over them is
//! one exact integer: scales are applied once for four blocks, and with AVX-512 codes are multiplied where they lie in
//! their bytes.

use super::super::codes::Ternary;
use super::super::kernel::{Isa, Scales};
use super::super::layout::ROW_GROUP;
use super::super::q8::Q8Block;

/// Bytes of the codes of a block.
pub(super) const PLANES: usize = 128;

/// A line of table bytes.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub struct TableLine(pub(super) [u8; 64]);

/// The sums of codes times activations of a token, for H vectors of rows.
pub(super) trait Dots<I: Isa, const H: usize>: Copy {
    /// The sums of u q over up to [`TOGETHER`](super::super::q8::TOGETHER) blocks from block `first` on, exactly, with codes u in 0..=2.
    ///
    /// # Safety
    /// The processor has `I`, `planes` are the codes of these blocks, and the token has them.
    unsafe fn dots<const BLOCKS: usize>(self, planes: *const u8, first: usize) -> [I::Floats; H];
}

/// The products of a token with a row group of ternary codes of so many blocks, added to the last argument. The token
/// is given by its blocks and their tables.
///
/// # Safety
/// The processor has the kernel's level, weights are a group of its scheme, the token has as
/// many blocks, and tables if this is for AVX2.
pub(in super::super) type OneToken =
    unsafe fn(*const u8, usize, (*const Q8Block, *const TableLine), &mut [f32; ROW_GROUP]);

/// Adds the products of a row group of ternary codes with one token to `sums`, of whose blocks each RUN have one
/// scale, as the weights' have.
///
/// # Safety
/// The processor has `I`, `weights` points to a row group of `Ternary` with S of `blocks` blocks, `x` to as many, which
/// are those of `dots`.
#[inline(always)]
pub(super) unsafe fn group<I: Isa, S: Scales, D: Dots<I, H>, const H: usize, const RUN: usize>(
    mut weights: *const u8,
    blocks: usize,
    x: *const Q8Block,
    dots: D,
    sums: &mut [f32; ROW_GROUP],
) {
    let layout = S::layout::<Ternary>();
    let lanes: [usize; H] = std::array::from_fn(|h| h * I::ROWS);
    // SAFETY: chunk by chunk this walks over the group and the token, which the caller vouches for.
    unsafe {
        let mut totals = lanes.map(|lane| I::load_f32(sums.as_ptr().add(lane).cast()));
        let mut chunk = 0;
        while chunk < blocks {
            let in_chunk = (blocks - chunk).min(layout.blocks);
            let shared = lanes.map(|lane| S::open::<I>(weights, lane));
            let mut j = 0;
            while j < in_chunk {
                let planes = weights.add(layout.head + j * layout.codes);
                let first = x.add(chunk + j);
                // What is left of a run goes block by block.
                let (some, dots, sum) = if in_chunk - j >= RUN {
                    let sum: f32 = (0..RUN).map(|i| (*first.add(i)).sum).sum();
                    (RUN, dots.dots::<RUN>(planes, chunk + j), sum)
                } else {
                    (1, dots.dots::<1>(planes, chunk + j), (*first).sum)
                };
                for (h, total) in totals.iter_mut().enumerate() {
                    let scale = S::at::<I>(shared[h], weights, lanes[h], (j, 0), 1.0);
                    let product = I::mul(dots[h], scale.scale);
                    *total = I::fma(product, I::set((*first).d), *total);
                    *total = I::fma(scale.offset, I::set(sum), *total);
                }
                j += some;
            }
            weights = weights.add(layout.head + in_chunk * layout.codes);
            chunk += in_chunk;
        }
        for (lane, total) in lanes.into_iter().zip(totals) {
            I::store(sums.as_mut_ptr().add(lane), total);
        }
    }
}
