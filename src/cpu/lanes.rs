//! Vectors of f32 lanes, so that a core is written once for every instruction set.
//!
//! A core is an `#[inline(always)]` function generic over [`Lanes`]; a wrapper for each
//! [`Level`](crate::cpu::simd::Level), marked with the level's `target_feature`, calls it with that
//! level's vector, and all of the vector's operations are inlined into the wrapper.

use half::{bf16, f16};

/// A vector of f32 lanes.
///
/// # Safety
/// All methods: the processor has the instruction set that the vector belongs to. Loads read
/// `Self::N` elements from `p` and stores write `Self::N` elements to it, without alignment.
pub trait Lanes: Copy {
    /// How many lanes there are.
    const N: usize;

    /// All lanes the same.
    unsafe fn splat(value: f32) -> Self;
    /// Reads f32.
    unsafe fn load_f32(p: *const f32) -> Self;
    /// Reads and widens f16.
    unsafe fn load_f16(p: *const f16) -> Self;
    /// Reads and widens bf16.
    unsafe fn load_bf16(p: *const bf16) -> Self;
    /// Writes f32.
    unsafe fn store_f32(self, p: *mut f32);
    /// Rounds to f16, to nearest even, and writes.
    unsafe fn store_f16(self, p: *mut f16);
    /// Rounds to bf16, to nearest even, and writes.
    unsafe fn store_bf16(self, p: *mut bf16);
    /// `self + other`
    unsafe fn add(self, other: Self) -> Self;
    /// `self - other`
    unsafe fn sub(self, other: Self) -> Self;
    /// `self * other`
    unsafe fn mul(self, other: Self) -> Self;
    /// `self * other + sum`, fused where the instruction set has it.
    unsafe fn mul_add(self, other: Self, sum: Self) -> Self;
    /// The sum of all lanes.
    unsafe fn sum(self) -> f32;
}

/// Four lanes of plain Rust, which compilers turn into the baseline's vectors.
#[derive(Clone, Copy)]
pub struct Plain([f32; 4]);

impl Plain {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|i| f(self.0[i], other.0[i])))
    }
}

// SAFETY (of the pointer reads and writes below): the caller vouches for four elements at `p`.
impl Lanes for Plain {
    const N: usize = 4;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Self([value; 4])
    }
    #[inline(always)]
    unsafe fn load_f32(p: *const f32) -> Self {
        // SAFETY: four elements may be read from `p`.
        Self(unsafe { p.cast::<[f32; 4]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const f16) -> Self {
        // SAFETY: four elements may be read from `p`.
        Self(unsafe { p.cast::<[f16; 4]>().read_unaligned() }.map(f16::to_f32))
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const bf16) -> Self {
        // SAFETY: four elements may be read from `p`.
        Self(unsafe { p.cast::<[bf16; 4]>().read_unaligned() }.map(bf16::to_f32))
    }
    #[inline(always)]
    unsafe fn store_f32(self, p: *mut f32) {
        // SAFETY: four elements may be written to `p`.
        unsafe { p.cast::<[f32; 4]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut f16) {
        // SAFETY: four elements may be written to `p`.
        unsafe {
            p.cast::<[f16; 4]>()
                .write_unaligned(self.0.map(f16::from_f32))
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut bf16) {
        // SAFETY: four elements may be written to `p`.
        unsafe {
            p.cast::<[bf16; 4]>()
                .write_unaligned(self.0.map(bf16::from_f32))
        }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b| a - b)
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn mul_add(self, other: Self, sum: Self) -> Self {
        // Not `f32::mul_add`, which is a call into libm where the baseline has no FMA.
        sum.zip(self.zip(other, |a, b| a * b), |s, p| s + p)
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        (self.0[0] + self.0[2]) + (self.0[1] + self.0[3])
    }
}

#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Lanes;
    use half::{bf16, f16};
    use std::arch::x86_64::*;

    /// Eight lanes: AVX2, FMA and F16C.
    #[derive(Clone, Copy)]
    pub struct Avx2(__m256);

    // In every method below: the caller vouches for the instruction set and for `N` elements at
    // `p`; none of the loads and stores asks for alignment.
    impl Lanes for Avx2 {
        const N: usize = 8;

        #[inline(always)]
        unsafe fn splat(value: f32) -> Self {
            // SAFETY: the caller vouches for the instruction set.
            Self(unsafe { _mm256_set1_ps(value) })
        }
        #[inline(always)]
        unsafe fn load_f32(p: *const f32) -> Self {
            // SAFETY: instruction set and eight elements, by the caller.
            Self(unsafe { _mm256_loadu_ps(p) })
        }
        #[inline(always)]
        unsafe fn load_f16(p: *const f16) -> Self {
            // SAFETY: instruction set and eight elements (16 bytes), by the caller.
            Self(unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) })
        }
        #[inline(always)]
        unsafe fn load_bf16(p: *const bf16) -> Self {
            // SAFETY: instruction set and eight elements (16 bytes), by the caller.
            unsafe {
                let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
                Self(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide)))
            }
        }
        #[inline(always)]
        unsafe fn store_f32(self, p: *mut f32) {
            // SAFETY: instruction set and eight elements, by the caller.
            unsafe { _mm256_storeu_ps(p, self.0) }
        }
        #[inline(always)]
        unsafe fn store_f16(self, p: *mut f16) {
            // SAFETY: instruction set and eight elements (16 bytes), by the caller.
            unsafe {
                let narrow = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0);
                _mm_storeu_si128(p.cast(), narrow);
            }
        }
        #[inline(always)]
        unsafe fn store_bf16(self, p: *mut bf16) {
            // SAFETY: instruction set and eight elements (16 bytes), by the caller.
            unsafe {
                let bits = _mm256_castps_si256(self.0);
                let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
                let half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
                let even = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, half));
                // A NaN keeps its sign and upper payload and becomes quiet.
                let quiet = _mm256_or_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(0x40));
                let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(self.0, self.0));
                let words = _mm256_blendv_epi8(even, quiet, nan);
                let packed = _mm256_packus_epi32(words, words);
                let packed = _mm256_permute4x64_epi64::<0b10_00>(packed);
                _mm_storeu_si128(p.cast(), _mm256_castsi256_si128(packed));
            }
        }
        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            // SAFETY: the caller vouches for the instruction set.
            Self(unsafe { _mm256_add_ps(self.0, other.0) })
        }
        #[inline(always)]
        unsafe fn sub(self, other: Self) -> Self {
            // SAFETY: the caller vouches for the instruction set.
            Self(unsafe { _mm256_sub_ps(self.0, other.0) })
        }
        #[inline(always)]
        unsafe fn mul(self, other: Self) -> Self {
            // SAFETY: the caller vouches for the instruction set.
            Self(unsafe { _mm256_mul_ps(self.0, other.0) })
        }
        #[inline(always)]
        unsafe fn mul_add(self, other: Self, sum: Self) -> Self {
            // SAFETY: the caller vouches for the instruction set.
            Self(unsafe { _mm256_fmadd_ps(self.0, other.0, sum.0) })
        }
        #[inline(always)]
        unsafe fn sum(self) -> f32 {
            // SAFETY: the caller vouches for the instruction set.
            unsafe {
                let high = _mm256_extractf128_ps::<1>(self.0);
                let four = _mm_add_ps(_mm256_castps256_ps128(self.0), high);
                let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
                _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
            }
        }
    }

    /// Sixteen lanes: AVX-512 F, BW, VL and DQ.
    #[derive(Clone, Copy)]
    pub struct Avx512(__m512);

    impl Lanes for Avx512 {
        const N: usize = 16;

        #[inline(always)]
        unsafe fn splat(value: f32) -> Self {
            // SAFETY: the caller vouches for the instruction set.
            Self(unsafe { _mm512_set1_ps(value) })
        }
        #[inline(always)]
        unsafe fn load_f32(p: *const f32) -> Self {
            // SAFETY: instruction set and sixteen elements, by the caller.
            Self(unsafe { _mm512_loadu_ps(p) })
        }
        #[inline(always)]
        unsafe fn load_f16(p: *const f16) -> Self {
            // SAFETY: instruction set and sixteen elements (32 bytes), by the caller.
            Self(unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) })
        }
        #[inline(always)]
        unsafe fn load_bf16(p: *const bf16) -> Self {
            // SAFETY: instruction set and sixteen elements (32 bytes), by the caller.
            unsafe {
                let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
                Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide)))
            }
        }
        #[inline(always)]
        unsafe fn store_f32(self, p: *mut f32) {
            // SAFETY: instruction set and sixteen elements, by the caller.
            unsafe { _mm512_storeu_ps(p, self.0) }
        }
        #[inline(always)]
        unsafe fn store_f16(self, p: *mut f16) {
            // SAFETY: instruction set and sixteen elements (32 bytes), by the caller.
            unsafe {
                let narrow = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0);
                _mm256_storeu_si256(p.cast(), narrow);
            }
        }
        #[inline(always)]
        unsafe fn store_bf16(self, p: *mut bf16) {
            // SAFETY: instruction set and sixteen elements (32 bytes), by the caller.
            unsafe {
                let bits = _mm512_castps_si512(self.0);
                let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
                let half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
                let even = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, half));
                // A NaN keeps its sign and upper payload and becomes quiet.
                let quiet = _mm512_or_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(0x40));
                let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self.0, self.0);
                let words = _mm512_mask_blend_epi32(nan, even, quiet);
                _mm256_storeu_si256(p.cast(), _mm512_cvtepi32_epi16(words));
            }
        }
        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            // SAFETY: the caller vouches for the instruction set.
            Self(unsafe { _mm512_add_ps(self.0, other.0) })
        }
        #[inline(always)]
        unsafe fn sub(self, other: Self) -> Self {
            // SAFETY: the caller vouches for the instruction set.
            Self(unsafe { _mm512_sub_ps(self.0, other.0) })
        }
        #[inline(always)]
        unsafe fn mul(self, other: Self) -> Self {
            // SAFETY: the caller vouches for the instruction set.
            Self(unsafe { _mm512_mul_ps(self.0, other.0) })
        }
        #[inline(always)]
        unsafe fn mul_add(self, other: Self, sum: Self) -> Self {
            // SAFETY: the caller vouches for the instruction set.
            Self(unsafe { _mm512_fmadd_ps(self.0, other.0, sum.0) })
        }
        #[inline(always)]
        unsafe fn sum(self) -> f32 {
            // SAFETY: the caller vouches for the instruction set.
            unsafe { _mm512_reduce_add_ps(self.0) }
        }
    }
}
