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
    pub(super) scales: Option<Scales<'a>>,
}

/// Factors that the rows of a view in pages are multiplied with, one for each: a page's lie head by head, those of a head
/// token by token.
#[derive(Clone, Copy, Debug)]
pub struct Scales<'a> {
    /// All factors.
    pub data: &'a [f32],
    /// The first one.
    pub offset: usize,
    /// From page to page, and from head to head.
    pub strides: [usize; 2],
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
    /// Tokens of the first page that come before the view's.
    pub skip: usize,
}

impl Pages<'_> {
    /// The page of a token, and its slot there.
    #[inline(always)]
    fn place(&self, token: usize) -> (usize, usize) {
        let at = self.skip + token;
        (self.table[at / self.page] as usize, at % self.page)
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
            scales: None,
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

    /// The view with factors for its rows, of `heads` heads; none if it is not in pages or a factor would lie outside
    /// `scales.data`.
    pub fn scaled(self, scales: Scales<'a>, heads: usize) -> Option<Self> {
        let pages = self.pages?;
        let [of_page, of_head] = scales.strides;
        let last = pages.table.iter().max().map_or(0, |id| *id as usize);
        let last = last.checked_mul(of_page)?.checked_add(scales.offset)?;
        let last = last.checked_add(heads.saturating_sub(1).checked_mul(of_head)?)?;
        let end = last.checked_add(pages.page)?;
        (pages.table.is_empty() || heads == 0 || end <= scales.data.len()).then_some(Self {
            scales: Some(scales),
            ..self
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
            Some(pages) => {
                let (page, slot) = pages.place(k);
                page * pages.stride + slot * self.strides[2]
            }
            None => k * self.strides[2],
        };
        let at = self.offset + i * self.strides[0] + j * self.strides[1] + token;
        // SAFETY: `new` or `paged` has checked the highest index.
        unsafe { self.data.as_ptr().add(at) }
    }

    /// What the row of token `k` in head `j` is multiplied with, if with anything.
    ///
    /// # Safety
    /// The indices are below the view's dimensions.
    #[inline(always)]
    pub(super) unsafe fn scale(&self, j: usize, k: usize) -> Option<f32> {
        let (scales, pages) = (self.scales.as_ref()?, self.pages.as_ref()?);
        let (page, slot) = pages.place(k);
        let at = scales.offset + page * scales.strides[0] + j * scales.strides[1] + slot;
        // SAFETY: `scaled` has checked the highest index.
        Some(unsafe { *scales.data.get_unchecked(at) })
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
