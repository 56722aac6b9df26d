//! The AVX2 and AVX-512 vectors.

use super::{Kernel, Vector};
use half::{bf16, f16};
use std::arch::x86_64::*;

/// Eight lanes.
#[derive(Clone, Copy)]
pub struct Avx2(__m256);

/// Sixteen lanes.
#[derive(Clone, Copy)]
pub struct Avx512(__m512);

/// # Safety
/// The processor has these instructions; the kernel's own obligations hold.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn run_avx2<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: handed to the caller.
    unsafe { kernel.run::<Avx2>() }
}

/// # Safety
/// The processor has these instructions; the kernel's own obligations hold.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub unsafe fn run_avx512<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: handed to the caller.
    unsafe { kernel.run::<Avx512>() }
}

/// A safe method out of an intrinsic call.
macro_rules! methods {
    ($(fn $name:ident($($arg:ident: $t:ty),*) -> $out:ty { $body:expr })*) => {$(
        #[inline(always)]
        fn $name($($arg: $t),*) -> $out {
            // SAFETY: a value of this type exists only where the processor has its instructions.
            unsafe { $body }
        }
    )*};
}

const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

/// The sums of the four vectors' lanes, in order.
#[inline(always)]
unsafe fn sum4_avx2(a: __m256, b: __m256, c: __m256, d: __m256) -> [f32; 4] {
    // SAFETY: the caller's vectors prove that the processor has AVX2.
    unsafe {
        // Shuffles and additions: a horizontal addition costs two shuffles more than it needs.
        let ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
        let cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
        let even = _mm256_shuffle_ps::<0b01_00_01_00>(ab, cd);
        let halves = _mm256_add_ps(even, _mm256_shuffle_ps::<0b11_10_11_10>(ab, cd));
        let sums = _mm_add_ps(
            _mm256_castps256_ps128(halves),
            _mm256_extractf128_ps::<1>(halves),
        );
        std::mem::transmute::<__m128, [f32; 4]>(sums)
    }
}

/// Upper 16 bits after rounding to nearest even; NaN stays NaN by setting a mantissa bit.
#[inline(always)]
unsafe fn to_bf16_avx2(v: __m256) -> __m128i {
    // SAFETY: the caller's vector proves that the processor has AVX2.
    unsafe {
        let bits = _mm256_castps_si256(v);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
        let high = _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, nan));
        _mm_packus_epi32(
            _mm256_castsi256_si128(high),
            _mm256_extracti128_si256::<1>(high),
        )
    }
}

impl Vector for Avx2 {
    const LANES: usize = 8;
    const REGISTERS: usize = 16;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: handed to the caller.
        Self(unsafe { _mm256_set1_ps(x) })
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: handed to the caller.
        Self(unsafe { _mm256_loadu_ps(p) })
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const f16) -> Self {
        // SAFETY: handed to the caller.
        Self(unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) })
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const bf16) -> Self {
        // SAFETY: handed to the caller.
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            Self(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide)))
        }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: handed to the caller.
        unsafe { _mm256_storeu_ps(p, self.0) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut f16) {
        // SAFETY: handed to the caller.
        unsafe {
            _mm_storeu_si128(
                p.cast(),
                _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0),
            )
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut bf16) {
        // SAFETY: handed to the caller.
        unsafe { _mm_storeu_si128(p.cast(), to_bf16_avx2(self.0)) }
    }

    #[inline(always)]
    fn fill(self, x: f32) -> Self {
        // SAFETY: `self` exists only where the processor has its instructions.
        unsafe { Self::splat(x) }
    }

    methods! {
        fn add(self: Self, o: Self) -> Self { Self(_mm256_add_ps(self.0, o.0)) }
        fn sub(self: Self, o: Self) -> Self { Self(_mm256_sub_ps(self.0, o.0)) }
        fn mul(self: Self, o: Self) -> Self { Self(_mm256_mul_ps(self.0, o.0)) }
        fn div(self: Self, o: Self) -> Self { Self(_mm256_div_ps(self.0, o.0)) }
        fn mul_add(self: Self, a: Self, b: Self) -> Self {
            Self(_mm256_fmadd_ps(self.0, a.0, b.0))
        }
        fn min(self: Self, o: Self) -> Self { Self(_mm256_min_ps(self.0, o.0)) }
        fn max(self: Self, o: Self) -> Self { Self(_mm256_max_ps(self.0, o.0)) }
        fn round(self: Self) -> Self { Self(_mm256_round_ps::<NEAREST>(self.0)) }
        fn abs(self: Self) -> Self {
            Self(_mm256_andnot_ps(_mm256_set1_ps(-0.0), self.0))
        }
        fn scale(self: Self, n: Self) -> Self {{
            // In two halves, so that subnormal results and those near the maximum come out right.
            let n = _mm256_cvtps_epi32(n.0);
            let half = _mm256_srai_epi32::<1>(n);
            let bias = _mm256_set1_epi32(127);
            let low = _mm256_slli_epi32::<23>(_mm256_add_epi32(half, bias));
            let rest = _mm256_add_epi32(_mm256_sub_epi32(n, half), bias);
            let high = _mm256_slli_epi32::<23>(rest);
            let x = _mm256_mul_ps(self.0, _mm256_castsi256_ps(low));
            Self(_mm256_mul_ps(x, _mm256_castsi256_ps(high)))
        }}
        fn power_of_two(self: Self) -> Self {
            Self(_mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_castps_si256(self.0))))
        }
        fn where_less(self: Self, bound: Self, yes: Self, no: Self) -> Self {
            Self(_mm256_blendv_ps(no.0, yes.0, _mm256_cmp_ps::<_CMP_LT_OQ>(self.0, bound.0)))
        }
        fn sum(self: Self) -> f32 {{
            let s = _mm_add_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
            let s = _mm_add_ps(s, _mm_movehl_ps(s, s));
            _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)))
        }}
        fn max_lane(self: Self) -> f32 {{
            let m = _mm_max_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
            let m = _mm_max_ps(m, _mm_movehl_ps(m, m));
            _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)))
        }}
        fn sum4(v: [Self; 4]) -> [f32; 4] { sum4_avx2(v[0].0, v[1].0, v[2].0, v[3].0) }
    }
}

/// The sum of the two halves.
#[inline(always)]
unsafe fn fold(v: __m512) -> __m256 {
    // SAFETY: the caller's vector proves that the processor has AVX-512.
    unsafe { _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v)) }
}

impl Vector for Avx512 {
    const LANES: usize = 16;
    const REGISTERS: usize = 32;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: handed to the caller.
        Self(unsafe { _mm512_set1_ps(x) })
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: handed to the caller.
        Self(unsafe { _mm512_loadu_ps(p) })
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const f16) -> Self {
        // SAFETY: handed to the caller.
        Self(unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) })
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const bf16) -> Self {
        // SAFETY: handed to the caller.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide)))
        }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: handed to the caller.
        unsafe { _mm512_storeu_ps(p, self.0) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut f16) {
        // SAFETY: handed to the caller.
        unsafe {
            _mm256_storeu_si256(
                p.cast(),
                _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0),
            )
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut bf16) {
        // SAFETY: handed to the caller.
        unsafe {
            let low = to_bf16_avx2(_mm512_castps512_ps256(self.0));
            let high = to_bf16_avx2(_mm512_extractf32x8_ps::<1>(self.0));
            _mm_storeu_si128(p.cast(), low);
            _mm_storeu_si128(p.add(8).cast(), high);
        }
    }

    #[inline(always)]
    fn fill(self, x: f32) -> Self {
        // SAFETY: `self` exists only where the processor has its instructions.
        unsafe { Self::splat(x) }
    }

    methods! {
        fn add(self: Self, o: Self) -> Self { Self(_mm512_add_ps(self.0, o.0)) }
        fn sub(self: Self, o: Self) -> Self { Self(_mm512_sub_ps(self.0, o.0)) }
        fn mul(self: Self, o: Self) -> Self { Self(_mm512_mul_ps(self.0, o.0)) }
        fn div(self: Self, o: Self) -> Self { Self(_mm512_div_ps(self.0, o.0)) }
        fn mul_add(self: Self, a: Self, b: Self) -> Self {
            Self(_mm512_fmadd_ps(self.0, a.0, b.0))
        }
        fn min(self: Self, o: Self) -> Self { Self(_mm512_min_ps(self.0, o.0)) }
        fn max(self: Self, o: Self) -> Self { Self(_mm512_max_ps(self.0, o.0)) }
        fn round(self: Self) -> Self { Self(_mm512_roundscale_ps::<NEAREST>(self.0)) }
        fn abs(self: Self) -> Self { Self(_mm512_abs_ps(self.0)) }
        fn scale(self: Self, n: Self) -> Self { Self(_mm512_scalef_ps(self.0, n.0)) }
        fn power_of_two(self: Self) -> Self {
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_castps_si512(self.0))))
        }
        fn where_less(self: Self, bound: Self, yes: Self, no: Self) -> Self {{
            let less = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, bound.0);
            Self(_mm512_mask_blend_ps(less, no.0, yes.0))
        }}
        fn sum(self: Self) -> f32 { Avx2(fold(self.0)).sum() }
        fn max_lane(self: Self) -> f32 {{
            let (low, high) =
                (_mm512_castps512_ps256(self.0), _mm512_extractf32x8_ps::<1>(self.0));
            Avx2(_mm256_max_ps(low, high)).max_lane()
        }}
        fn sum4(v: [Self; 4]) -> [f32; 4] {
            sum4_avx2(fold(v[0].0), fold(v[1].0), fold(v[2].0), fold(v[3].0))
        }
    }
}
