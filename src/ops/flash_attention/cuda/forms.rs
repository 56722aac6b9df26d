//! What kernels of attention are compiled for: dtypes, architectures and head sizes.

use candle_core::DType;
use std::fmt;

/// The newest architecture that there is.
pub(crate) const NEWEST: u32 = u32::MAX;

/// Dtypes for which a kernel is there, with the architectures and head sizes that it is there for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Forms {
    /// Of queries; none for each.
    pub q: Option<DType>,
    /// Of keys and values; none for each.
    pub kv: Option<DType>,
    /// Least and greatest.
    pub arch: [u32; 2],
    pub head_sizes: HeadSizes,
}

/// The head sizes of a table of compiled forms.
macro_rules! head_sizes {
    ($forms:expr) => {{
        let mut sizes = [0; $forms.len()];
        let mut i = 0;
        while i < sizes.len() {
            sizes[i] = $forms[i].dim;
            i += 1;
        }
        sizes
    }};
}
pub(crate) use head_sizes;

/// Head sizes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum HeadSizes {
    Of(&'static [usize]),
    UpTo(usize),
}

impl HeadSizes {
    fn contains(self, dim: usize) -> bool {
        match self {
            HeadSizes::Of(dims) => dims.contains(&dim),
            HeadSizes::UpTo(most) => dim <= most,
        }
    }
}

impl Forms {
    /// Queries, keys and values of one dtype.
    pub const fn of(dtype: DType, arch: [u32; 2], head_sizes: HeadSizes) -> Self {
        Self {
            q: Some(dtype),
            kv: Some(dtype),
            arch,
            head_sizes,
        }
    }

    /// Keys and values of this dtype, queries of each.
    pub const fn over(kv: DType, arch: [u32; 2], head_sizes: HeadSizes) -> Self {
        Self {
            q: None,
            kv: Some(kv),
            arch,
            head_sizes,
        }
    }

    /// Each dtype on each GPU.
    pub const fn of_each(head_sizes: HeadSizes) -> Self {
        Self {
            q: None,
            kv: None,
            arch: [0, NEWEST],
            head_sizes,
        }
    }

    /// Why none of `forms` is for this, if none is.
    pub fn refusal(
        forms: &[Self],
        [q, kv]: [DType; 2],
        arch: u32,
        dim: usize,
    ) -> Option<&'static str> {
        let on_arch = |form: &&Self| (form.arch[0]..=form.arch[1]).contains(&arch);
        let of_types =
            |form: &&Self| form.q.is_none_or(|t| t == q) && form.kv.is_none_or(|t| t == kv);
        let forms = forms.iter();
        if !forms.clone().any(|form| on_arch(&form)) {
            return Some("it is for other architectures");
        }
        if !forms.clone().any(|form| of_types(&form)) {
            return Some("it is for other dtypes");
        }
        let mut there = forms.filter(on_arch).filter(of_types).peekable();
        if there.peek().is_none() {
            return Some("on this architecture it is for other dtypes");
        }
        let fits = there.any(|form| form.head_sizes.contains(dim));
        (!fits).then_some("it is for other head sizes")
    }
}

/// As in `64, 80` or `up to 512`.
impl fmt::Display for HeadSizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HeadSizes::Of(dims) => {
                let dims: Vec<_> = dims.iter().map(usize::to_string).collect();
                f.write_str(&dims.join(", "))
            }
            HeadSizes::UpTo(most) => write!(f, "up to {most}"),
        }
    }
}
