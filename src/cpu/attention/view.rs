//! Where queries, keys, values, masks and results lie.

use half::{bf16, f16};
use std::mem::MaybeUninit;

/// A tensor of four dimensions in storage, checked to lie inside it. Its third dimension, the tokens, may lie in pages.
#[derive(Clone, Copy, Debug)]
pub struct View<'a, T> {
    data: &'a [T],
    offset: usize,
    pub(super) strides: [usize; 4],
    pages: Option<Pages<'a>>,
}

/// The pages that the tokens of a view lie in, one behind the other.
#[derive(Clone, Copy, Debug)]
pub struct Pages<'a> {
    /// Numbers of the pages.
    pub table: &'a [u32],
    /// Tokens of a page.
    pub page: usize,
    /// Elements from page to page.
    pub stride: usize,
    /// Tokens of the first page that are in front of the view's.
    pub skip: usize,
}

impl Pages<'_> {
    /// Where a token is, tokens of a page lying `stride` elements apart.
    #[inline(always)]
    fn place(&self, token: usize, stride: usize) -> usize {
        let at = self.skip + token;
        self.table[at / self.page] as usize * self.stride + at % self.page * stride
    }
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
            pages: None,
        })
    }

    /// The view of tokens that lie in pages, or none if there are fewer or an element would lie outside `data`.
    pub fn paged(
        data: &'a [T],
        offset: usize,
        dims: [usize; 4],
        strides: [usize; 4],
        pages: Pages<'a>,
    ) -> Option<Self> {
        let room = pages.table.len().checked_mul(pages.page)?;
        if pages.page == 0 || room < pages.skip.checked_add(dims[2])? {
            return None;
        }
        let last = pages.table.iter().max().map_or(0, |id| *id as usize);
        let offset_of_last = offset.checked_add(last.checked_mul(pages.stride)?)?;
        let [batch, heads, tokens, dim] = dims;
        // Tokens of any page may be asked for up to its end.
        let in_page = [batch, heads, if tokens == 0 { 0 } else { pages.page }, dim];
        Self::new(data, offset_of_last, in_page, strides).map(|view| Self {
            offset,
            pages: Some(pages),
            ..view
        })
    }

    /// The tokens from `token` on, of which the view has as many.
    pub fn behind(self, token: usize) -> Self {
        match self.pages {
            Some(pages) => Self {
                pages: Some(Pages {
                    skip: pages.skip + token,
                    ..pages
                }),
                ..self
            },
            None => Self {
                offset: self.offset + token * self.strides[2],
                ..self
            },
        }
    }

    /// How many tokens from `token` on, of `count`, lie in steps of the third stride.
    #[inline(always)]
    pub(super) fn run(&self, token: usize, count: usize) -> usize {
        match self.pages {
            Some(pages) => count.min(pages.page - (pages.skip + token) % pages.page),
            None => count,
        }
    }

    /// The first element of a row.
    ///
    /// # Safety
    /// The indices are below the view's dimensions.
    #[inline(always)]
    pub(super) unsafe fn row(&self, i: usize, j: usize, k: usize) -> *const T {
        let token = match self.pages {
            Some(pages) => pages.place(k, self.strides[2]),
            None => k * self.strides[2],
        };
        let at = self.offset + i * self.strides[0] + j * self.strides[1] + token;
        // SAFETY: `new` or `paged` has checked the highest index.
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
