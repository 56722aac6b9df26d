//! Where queries, keys, values, masks and results lie.

use half::{bf16, f16};
use std::mem::MaybeUninit;

/// A tensor of four dimensions in storage, checked to lie inside it.
#[derive(Clone, Copy, Debug)]
pub struct View<'a, T> {
    data: &'a [T],
    offset: usize,
    pub(super) strides: [usize; 4],
}

impl<'a, T: Copy> View<'a, T> {
    /// The view, or none if an element of it would lie outside `data`.
    pub fn new(
        data: &'a [T],
        offset: usize,
        dims: [usize; 4],
        strides: [usize; 4],
    ) -> Option<Self> {
        let mut last = offset;
        for (dim, stride) in dims.into_iter().zip(strides) {
            last = last.checked_add(dim.saturating_sub(1).checked_mul(stride)?)?;
        }
        (dims.contains(&0) || last < data.len()).then_some(Self {
            data,
            offset,
            strides,
        })
    }

    /// The tokens from `token` on, of which the view has as many.
    pub fn behind(self, token: usize) -> Self {
        Self {
            offset: self.offset + token * self.strides[2],
            ..self
        }
    }

    /// The first element of a row.
    ///
    /// # Safety
    /// The indices are below the view's dimensions.
    #[inline(always)]
    pub(super) unsafe fn row(&self, i: usize, j: usize, k: usize) -> *const T {
        let at = self.offset + i * self.strides[0] + j * self.strides[1] + k * self.strides[2];
        // SAFETY: `new` has checked the highest index.
        unsafe { self.data.as_ptr().add(at) }
    }
}

/// A view of any of the float types.
#[derive(Clone, Copy, Debug)]
pub enum AnyView<'a> {
    /// 32 bits.
    F32(View<'a, f32>),
    /// 16 bits, IEEE.
    F16(View<'a, f16>),
    /// The upper 16 bits of an f32.
    Bf16(View<'a, bf16>),
}

impl AnyView<'_> {
    /// As [`View::behind`].
    pub fn behind(self, token: usize) -> Self {
        match self {
            AnyView::F32(view) => AnyView::F32(view.behind(token)),
            AnyView::F16(view) => AnyView::F16(view.behind(token)),
            AnyView::Bf16(view) => AnyView::Bf16(view.behind(token)),
        }
    }
}

/// Where the result goes: `[batch, queries, heads, dim]` of each part of a call, contiguous.
#[derive(Debug)]
pub enum Output<'a> {
    /// 32 bits.
    F32(&'a mut [MaybeUninit<f32>]),
    /// 16 bits, IEEE.
    F16(&'a mut [MaybeUninit<f16>]),
    /// The upper 16 bits of an f32.
    Bf16(&'a mut [MaybeUninit<bf16>]),
}
