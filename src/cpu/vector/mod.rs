//! One vector of f32, as wide as the instruction set has it, so that a core is written once.
//!
//! A core is a [`Kernel`]: its `run` is generic over the [`Vector`] and [`dispatch`] compiles it
//! once per level, inside a function that has the level's instructions enabled. Everything between
//! `run` and the intrinsics has to be `#[inline(always)]`, since only code that is inlined into
//! that function may use the wide registers.

use crate::cpu::simd::{self, Level};
use half::{bf16, f16};
use std::any::TypeId;

/// A vector of f32 lanes.
///
/// # Safety
/// The constructors (`splat`, `load*`) are unsafe: they may run only where the processor has the
/// vector's instructions. A value therefore proves that it has, and the methods that take one are
/// safe. Pointers must be valid for `LANES` elements; they need no alignment.
pub trait Vector: Copy {
    /// Number of lanes.
    const LANES: usize;
    /// Vectors that the processor's registers hold.
    const REGISTERS: usize;

    /// All lanes `x`.
    ///
    /// # Safety
    /// The processor has the vector's instructions.
    unsafe fn splat(x: f32) -> Self;
    /// # Safety
    /// The processor has the vector's instructions; `p` is valid for reading `LANES` elements.
    unsafe fn load(p: *const f32) -> Self;
    /// As [`Vector::load`], widened exactly.
    ///
    /// # Safety
    /// As for [`Vector::load`].
    unsafe fn load_f16(p: *const f16) -> Self;
    /// As [`Vector::load`], widened exactly.
    ///
    /// # Safety
    /// As for [`Vector::load`].
    unsafe fn load_bf16(p: *const bf16) -> Self;
    /// # Safety
    /// `p` is valid for writing `LANES` elements.
    unsafe fn store(self, p: *mut f32);
    /// As [`Vector::store`], rounded to nearest even.
    ///
    /// # Safety
    /// As for [`Vector::store`].
    unsafe fn store_f16(self, p: *mut f16);
    /// As [`Vector::store`], rounded to nearest even.
    ///
    /// # Safety
    /// As for [`Vector::store`].
    unsafe fn store_bf16(self, p: *mut bf16);

    /// All lanes `x`; `self` only proves that there are such lanes.
    fn fill(self, x: f32) -> Self;
    /// `self + o`
    fn add(self, o: Self) -> Self;
    /// `self - o`
    fn sub(self, o: Self) -> Self;
    /// `self * o`
    fn mul(self, o: Self) -> Self;
    /// `self / o`
    fn div(self, o: Self) -> Self;
    /// `self * a + b`, rounded once where the level has a fused instruction.
    fn mul_add(self, a: Self, b: Self) -> Self;
    /// The smaller one; `o` where either is NaN.
    fn min(self, o: Self) -> Self;
    /// The larger one; `o` where either is NaN.
    fn max(self, o: Self) -> Self;
    /// The nearest whole number, ties to even.
    fn round(self) -> Self;
    /// `|self|`
    fn abs(self) -> Self;
    /// `self * 2^n` for whole `n` from -252 to 252, rounded once; NaN stays NaN whatever `n` is.
    fn scale(self, n: Self) -> Self;
    /// `2^n` where `self` is [`BIASED`]` + n` and `n` is whole, from -126 to 127; anything where it is
    /// not.
    fn power_of_two(self) -> Self;
    /// `yes` where `self < bound`, else `no`.
    fn where_less(self, bound: Self, yes: Self, no: Self) -> Self;
    /// The sum of the lanes.
    fn sum(self) -> f32;
    /// The largest lane.
    fn max_lane(self) -> f32;
    /// The sums of four vectors.
    fn sum4(v: [Self; 4]) -> [f32; 4];
}

/// Added to a small number, it leaves the nearest whole number, plus the exponent's bias, in the
/// lowest bits.
pub const BIASED: f32 = (3 << 22) as f32 + 127.0;

/// An element type that a core reads and writes through vectors of f32.
pub trait Element: Copy + Send + Sync + 'static {
    /// # Safety
    /// As for [`Vector::load`].
    unsafe fn load<V: Vector>(p: *const Self) -> V;
    /// # Safety
    /// As for [`Vector::store`].
    unsafe fn store<V: Vector>(v: V, p: *mut Self);
    /// The value as f32, which is exact.
    fn to_f32(self) -> f32;
    /// The value rounded to this type, to nearest even.
    fn from_f32(x: f32) -> Self;
}

macro_rules! element {
    ($t:ty, $load:ident, $store:ident, $to:expr, $from:expr) => {
        impl Element for $t {
            #[inline(always)]
            unsafe fn load<V: Vector>(p: *const Self) -> V {
                // SAFETY: the caller's obligation is the same.
                unsafe { V::$load(p) }
            }
            #[inline(always)]
            unsafe fn store<V: Vector>(v: V, p: *mut Self) {
                // SAFETY: the caller's obligation is the same.
                unsafe { v.$store(p) }
            }
            #[inline(always)]
            fn to_f32(self) -> f32 {
                $to(self)
            }
            #[inline(always)]
            fn from_f32(x: f32) -> Self {
                $from(x)
            }
        }
    };
}
element!(
    f32,
    load,
    store,
    std::convert::identity,
    std::convert::identity
);
element!(f16, load_f16, store_f16, f16::to_f32, f16::from_f32);
element!(bf16, load_bf16, store_bf16, bf16::to_f32, bf16::from_f32);

/// Whether `T` is f32, so that values need no rounding.
///
/// ```
/// use candle_fused::cpu::vector::is_f32;
/// assert!(is_f32::<f32>() && !is_f32::<half::f16>());
/// ```
#[inline(always)]
pub fn is_f32<T: Element>() -> bool {
    TypeId::of::<T>() == TypeId::of::<f32>()
}

/// Widens `n` elements that lie `stride` apart.
///
/// # Safety
/// The processor has `V`'s instructions; every element of `src` that is named may be read, and
/// `dst` may be written for `n` elements and does not overlap `src`.
///
/// ```
/// use candle_fused::cpu::simd;
/// use candle_fused::cpu::vector::{Kernel, Vector, dispatch, widen};
/// use half::bf16;
/// struct Widen<'a>(&'a [bf16], &'a mut [f32]);
/// impl Kernel for Widen<'_> {
///     type Output = ();
///     #[inline(always)]
///     unsafe fn run<V: Vector>(self) {
///         // SAFETY: the slices are of one length and do not overlap.
///         unsafe { widen::<V, bf16>(self.0.as_ptr(), 1, self.1.as_mut_ptr(), self.0.len()) }
///     }
/// }
/// let (x, mut y) = ([bf16::ONE; 20], [0.; 20]);
/// // SAFETY: the kernel holds slices.
/// unsafe { dispatch(simd::level(), Widen(&x, &mut y)) };
/// assert_eq!(y, [1.; 20]);
/// ```
#[inline(always)]
pub unsafe fn widen<V: Vector, T: Element>(src: *const T, stride: usize, dst: *mut f32, n: usize) {
    let mut i = 0;
    // SAFETY: indices stay below `n`.
    unsafe {
        if stride == 1 {
            while i + V::LANES <= n {
                T::load::<V>(src.add(i)).store(dst.add(i));
                i += V::LANES;
            }
        }
        while i < n {
            *dst.add(i) = (*src.add(i * stride)).to_f32();
            i += 1;
        }
    }
}

/// Rounds `n` elements to `T`.
///
/// # Safety
/// The processor has `V`'s instructions; `src` may be read and `dst` written for `n` elements, and
/// they do not overlap.
///
/// ```
/// use candle_fused::cpu::simd;
/// use candle_fused::cpu::vector::{Kernel, Vector, dispatch, narrow};
/// use half::bf16;
/// struct Narrow<'a>(&'a [f32], &'a mut [bf16]);
/// impl Kernel for Narrow<'_> {
///     type Output = ();
///     #[inline(always)]
///     unsafe fn run<V: Vector>(self) {
///         // SAFETY: the slices are of one length and do not overlap.
///         unsafe { narrow::<V, bf16>(self.0.as_ptr(), self.1.as_mut_ptr(), self.0.len()) }
///     }
/// }
/// let (x, mut y) = ([1.; 20], [bf16::ZERO; 20]);
/// // SAFETY: the kernel holds slices.
/// unsafe { dispatch(simd::level(), Narrow(&x, &mut y)) };
/// assert_eq!(y, [bf16::ONE; 20]);
/// ```
#[inline(always)]
pub unsafe fn narrow<V: Vector, T: Element>(src: *const f32, dst: *mut T, n: usize) {
    let mut i = 0;
    // SAFETY: indices stay below `n`.
    unsafe {
        while i + V::LANES <= n {
            T::store(V::load(src.add(i)), dst.add(i));
            i += V::LANES;
        }
        while i < n {
            *dst.add(i) = T::from_f32(*src.add(i));
            i += 1;
        }
    }
}

/// Widens a row.
pub(crate) fn widen_all<T: Element>(level: Level, src: &[T], dst: &mut [f32]) {
    struct Widen<'a, T>(&'a [T], &'a mut [f32]);
    impl<T: Element> Kernel for Widen<'_, T> {
        type Output = ();
        #[inline(always)]
        unsafe fn run<V: Vector>(self) {
            // SAFETY: two slices of one length; the instructions are the caller's.
            unsafe { widen::<V, T>(self.0.as_ptr(), 1, self.1.as_mut_ptr(), self.0.len()) }
        }
    }
    assert_eq!(src.len(), dst.len());
    // SAFETY: the kernel holds slices of one length.
    unsafe { dispatch(level, Widen(src, dst)) }
}

/// Rounds a row to `T`.
///
/// # Safety
/// `dst` may be written for as many elements as `src` has, and does not overlap it.
pub(crate) unsafe fn narrow_all<T: Element>(level: Level, src: &[f32], dst: *mut T) {
    struct Narrow<'a, T>(&'a [f32], *mut T);
    impl<T: Element> Kernel for Narrow<'_, T> {
        type Output = ();
        #[inline(always)]
        unsafe fn run<V: Vector>(self) {
            // SAFETY: the caller's of `narrow_all`, and of `run`.
            unsafe { narrow::<V, T>(self.0.as_ptr(), self.1, self.0.len()) }
        }
    }
    // SAFETY: the caller's.
    unsafe { dispatch(level, Narrow(src, dst)) }
}

/// A core, generic over the vector.
pub trait Kernel {
    /// What the core returns.
    type Output;
    /// Runs the core. Implementations are `#[inline(always)]`.
    ///
    /// # Safety
    /// The processor has `V`'s instructions, and whatever the kernel's pointers promise holds.
    unsafe fn run<V: Vector>(self) -> Self::Output;
}

/// Runs `kernel` with the vector of `level`, or of the best level that this processor has where
/// that is less.
///
/// # Safety
/// Whatever the kernel's pointers promise holds.
///
/// ```
/// use candle_fused::cpu::simd::Level;
/// use candle_fused::cpu::vector::{Kernel, Vector, dispatch};
/// struct Lanes;
/// impl Kernel for Lanes {
///     type Output = usize;
///     #[inline(always)]
///     unsafe fn run<V: Vector>(self) -> usize {
///         V::LANES
///     }
/// }
/// // SAFETY: the kernel has no pointers.
/// assert_eq!(unsafe { dispatch(Level::Scalar, Lanes) }, 4);
/// ```
pub unsafe fn dispatch<K: Kernel>(level: Level, kernel: K) -> K::Output {
    match level.min(simd::best()) {
        // SAFETY: the portable vector needs no instructions of its own.
        Level::Scalar => unsafe { kernel.run::<portable::Lanes4>() },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `best()` has detected what the function enables.
        Level::Avx2 => unsafe { x86::run_avx2(kernel) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `best()` has detected what the function enables.
        Level::Avx512 | Level::Avx512Bf16 | Level::Amx => unsafe { x86::run_avx512(kernel) },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: NEON belongs to the architecture.
        Level::Neon | Level::Dotprod => unsafe { kernel.run::<aarch64::Neon>() },
    }
}

#[cfg(target_arch = "aarch64")]
mod aarch64;
mod codes;
mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "aarch64")]
pub(super) use aarch64::widen_f16;
pub use codes::{E4m3, Int8};

#[cfg(test)]
mod tests;
