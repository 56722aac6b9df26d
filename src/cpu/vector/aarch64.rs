//! The NEON vector. Every aarch64 processor that runs an operating system has NEON, so that its
//! functions need no wrapper that enables it.

use super::Vector;
use half::{bf16, f16};
use std::arch::aarch64::*;
use std::arch::asm;

/// Four lanes.
#[derive(Clone, Copy)]
pub struct Neon(float32x4_t);

/// Four f16, given by their bits, as f32.
///
/// Assembly here and in [`narrow_f16`], since vectors of f16 are not stable at the crate's oldest
/// compiler. The conversions are part of NEON, unlike arithmetic in f16.
#[inline(always)]
pub fn widen_f16(x: uint16x4_t) -> float32x4_t {
    let wide;
    // SAFETY: the instruction only touches these registers.
    unsafe {
        asm!(
            "fcvtl {wide:v}.4s, {x:v}.4h",
            wide = lateout(vreg) wide,
            x = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    wide
}

/// The bits of four f32 rounded to f16, to nearest even.
#[inline(always)]
fn narrow_f16(x: float32x4_t) -> uint16x4_t {
    let narrow;
    // SAFETY: the instruction only touches these registers.
    unsafe {
        asm!(
            "fcvtn {narrow:v}.4h, {x:v}.4s",
            narrow = lateout(vreg) narrow,
            x = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    narrow
}

/// A safe method out of an intrinsic call.
macro_rules! methods {
    ($(fn $name:ident($($arg:ident: $t:ty),*) -> $out:ty { $body:expr })*) => {$(
        #[inline(always)]
        fn $name($($arg: $t),*) -> $out {
            // SAFETY: every processor of this architecture has NEON.
            unsafe { $body }
        }
    )*};
}

impl Vector for Neon {
    const LANES: usize = 4;
    const REGISTERS: usize = 32;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: handed to the caller.
        Self(unsafe { vdupq_n_f32(x) })
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: handed to the caller.
        Self(unsafe { vld1q_f32(p) })
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const f16) -> Self {
        // SAFETY: handed to the caller.
        Self(widen_f16(unsafe { vld1_u16(p.cast()) }))
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const bf16) -> Self {
        // SAFETY: handed to the caller.
        Self(unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(p.cast()))) })
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: handed to the caller.
        unsafe { vst1q_f32(p, self.0) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut f16) {
        // SAFETY: handed to the caller.
        unsafe { vst1_u16(p.cast(), narrow_f16(self.0)) }
    }
    /// Upper 16 bits after rounding to nearest even; NaN stays NaN by setting a mantissa bit.
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut bf16) {
        // SAFETY: handed to the caller.
        unsafe {
            let bits = vreinterpretq_u32_f32(self.0);
            let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
            let rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
            let quiet = vorrq_u32(bits, vdupq_n_u32(0x0040_0000));
            let number = vceqq_f32(self.0, self.0);
            vst1_u16(
                p.cast(),
                vshrn_n_u32::<16>(vbslq_u32(number, rounded, quiet)),
            );
        }
    }

    #[inline(always)]
    fn fill(self, x: f32) -> Self {
        // SAFETY: every processor of this architecture has NEON.
        unsafe { Self::splat(x) }
    }

    // NEON's own minimum and maximum give NaN where either is.
    #[inline(always)]
    fn min(self, o: Self) -> Self {
        self.where_less(o, self, o)
    }
    #[inline(always)]
    fn max(self, o: Self) -> Self {
        o.where_less(self, self, o)
    }

    methods! {
        fn add(self: Self, o: Self) -> Self { Self(vaddq_f32(self.0, o.0)) }
        fn sub(self: Self, o: Self) -> Self { Self(vsubq_f32(self.0, o.0)) }
        fn mul(self: Self, o: Self) -> Self { Self(vmulq_f32(self.0, o.0)) }
        fn div(self: Self, o: Self) -> Self { Self(vdivq_f32(self.0, o.0)) }
        fn mul_add(self: Self, a: Self, b: Self) -> Self { Self(vfmaq_f32(b.0, self.0, a.0)) }
        fn round(self: Self) -> Self { Self(vrndnq_f32(self.0)) }
        fn abs(self: Self) -> Self { Self(vabsq_f32(self.0)) }
        fn scale(self: Self, n: Self) -> Self {{
            // In two halves, so that subnormal results and those near the maximum come out right.
            let n = vcvtnq_s32_f32(n.0);
            let half = vshrq_n_s32::<1>(n);
            let bias = vdupq_n_s32(127);
            let low = vshlq_n_s32::<23>(vaddq_s32(half, bias));
            let high = vshlq_n_s32::<23>(vaddq_s32(vsubq_s32(n, half), bias));
            let x = vmulq_f32(self.0, vreinterpretq_f32_s32(low));
            Self(vmulq_f32(x, vreinterpretq_f32_s32(high)))
        }}
        fn power_of_two(self: Self) -> Self {
            Self(vreinterpretq_f32_u32(vshlq_n_u32::<23>(vreinterpretq_u32_f32(self.0))))
        }
        fn where_less(self: Self, bound: Self, yes: Self, no: Self) -> Self {
            Self(vbslq_f32(vcltq_f32(self.0, bound.0), yes.0, no.0))
        }
        fn sum(self: Self) -> f32 { vaddvq_f32(self.0) }
        fn max_lane(self: Self) -> f32 { vmaxnmvq_f32(self.0) }
        fn sum4(v: [Self; 4]) -> [f32; 4] {{
            let (ab, cd) = (vpaddq_f32(v[0].0, v[1].0), vpaddq_f32(v[2].0, v[3].0));
            std::mem::transmute::<float32x4_t, [f32; 4]>(vpaddq_f32(ab, cd))
        }}
    }
}
