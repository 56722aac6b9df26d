//! Codes of quantized keys and values as elements: what they stand for before they are scaled.

use super::{Element, Vector};
use crate::quant::KvFormat;
use half::f16;

/// Lanes of the widest vector.
const MOST_LANES: usize = 16;

macro_rules! code {
    ($(#[$doc:meta])* $t:ident, $format:expr, $part:ty, $zero:expr, $widen:expr, $load:expr) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        #[repr(transparent)]
        pub struct $t(u8);

        impl $t {
            /// Bytes as codes.
            pub fn of(bytes: &[u8]) -> &[Self] {
                // SAFETY: a transparent struct of a byte, of which each value is one.
                unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len()) }
            }
        }

        impl Element for $t {
            #[inline(always)]
            unsafe fn load<V: Vector>(p: *const Self) -> V {
                let mut parts: [$part; MOST_LANES] = [$zero; MOST_LANES];
                for (i, part) in parts.iter_mut().enumerate().take(V::LANES) {
                    // SAFETY: the caller's; there are at most as many lanes as parts.
                    *part = $widen(unsafe { *p.add(i) }.0);
                }
                // SAFETY: the caller's.
                unsafe { $load(parts.as_ptr()) }
            }
            #[inline(always)]
            unsafe fn store<V: Vector>(v: V, p: *mut Self) {
                let mut parts = [0f32; MOST_LANES];
                // SAFETY: the caller's; there are at most as many lanes as parts.
                unsafe {
                    v.store(parts.as_mut_ptr());
                    for (i, part) in parts.iter().enumerate().take(V::LANES) {
                        *p.add(i) = Self::from_f32(*part);
                    }
                }
            }
            #[inline(always)]
            fn to_f32(self) -> f32 {
                $format.value(self.0)
            }
            #[inline(always)]
            fn from_f32(x: f32) -> Self {
                Self($format.code(x))
            }
        }
    };
}

code!(
    /// [`KvFormat::Fp8`].
    E4m3,
    KvFormat::Fp8,
    f16,
    f16::ZERO,
    // As `KvFormat::value`, lane by lane.
    |code: u8| f16::from_bits(u16::from(code & 0x80) << 8 | u16::from(code & 0x7f) << 7),
    |parts| V::load_f16(parts).mul(V::splat(256.))
);
code!(
    /// [`KvFormat::Int8`].
    Int8,
    KvFormat::Int8,
    f32,
    0.,
    |code: u8| f32::from(code.cast_signed()),
    |parts| V::load(parts)
);
