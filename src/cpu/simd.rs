//! Which instruction set the cores use, decided once per process.

#[cfg(target_arch = "x86_64")]
use super::tiles::amx;
use std::sync::OnceLock;

/// Instruction sets of this architecture that a core may have a path for, in rising order. More may come, so a
/// `match` needs an arm for the rest.
///
/// ```
/// use candle_fused::cpu::simd::{self, Level};
/// let levels = Level::available();
/// assert_eq!((levels[0], levels.last()), (Level::Scalar, Some(&simd::best())));
/// assert!(levels.iter().all(|level| level.supported() == *level));
/// assert_eq!(Level::Scalar.name(), "scalar");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Level {
    /// Plain Rust, right on every architecture.
    Scalar,
    /// AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, BW, VL, DQ and VNNI.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// The same, and products of bf16 and conversion to it.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    /// The same, and AMX with products of bf16, on Linux.
    #[cfg(target_arch = "x86_64")]
    Amx,
    /// NEON, which every aarch64 processor has.
    #[cfg(target_arch = "aarch64")]
    Neon,
    /// NEON and the dot products of ARMv8.2.
    #[cfg(target_arch = "aarch64")]
    Dotprod,
}

impl Level {
    /// Every level of this architecture.
    pub(super) const ALL: &[Level] = &[
        Level::Scalar,
        #[cfg(target_arch = "x86_64")]
        Level::Avx2,
        #[cfg(target_arch = "x86_64")]
        Level::Avx512,
        #[cfg(target_arch = "x86_64")]
        Level::Avx512Bf16,
        #[cfg(target_arch = "x86_64")]
        Level::Amx,
        #[cfg(target_arch = "aarch64")]
        Level::Neon,
        #[cfg(target_arch = "aarch64")]
        Level::Dotprod,
    ];

    /// Every level that this processor can run, lowest first.
    ///
    /// Tests use it to run each path that can be run here; `CANDLE_FUSED_SIMD` does not narrow it.
    pub fn available() -> Vec<Level> {
        let all = Self::ALL.iter().copied();
        all.filter(|l| *l <= best()).collect()
    }

    /// This level, or the best that the processor has where it lacks this one.
    ///
    /// A core that takes a level as an argument asks this before it enters code for that level, so
    /// that no argument can make it execute instructions that do not exist.
    pub fn supported(self) -> Level {
        self.min(best())
    }

    /// This level but for products of bf16, in AMX's tiles or without: the rest of these levels is AVX-512's.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn without_tiles(self) -> Level {
        match self {
            Level::Avx512Bf16 | Level::Amx => Level::Avx512,
            other => other,
        }
    }

    /// The name that `CANDLE_FUSED_SIMD` takes.
    pub fn name(self) -> &'static str {
        match self {
            Level::Scalar => "scalar",
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512Bf16 => "avx512bf16",
            #[cfg(target_arch = "x86_64")]
            Level::Amx => "amx",
            #[cfg(target_arch = "aarch64")]
            Level::Neon => "neon",
            #[cfg(target_arch = "aarch64")]
            Level::Dotprod => "dotprod",
        }
    }
}

/// The level in use: the best that the processor has, or less where the environment variable
/// `CANDLE_FUSED_SIMD` asks for less (`scalar`; `avx2`, `avx512`, `avx512bf16`, `amx` on x86;
/// `neon`, `dotprod` on aarch64).
///
/// ```
/// use candle_fused::cpu::simd;
/// assert!(simd::level() <= simd::best());
/// ```
pub fn level() -> Level {
    static LEVEL: OnceLock<Level> = OnceLock::new();
    *LEVEL.get_or_init(|| {
        let best = best();
        let Ok(asked) = std::env::var("CANDLE_FUSED_SIMD") else {
            return best;
        };
        match Level::ALL.iter().find(|l| l.name() == asked) {
            Some(l) => best.min(*l),
            None => {
                let names: Vec<_> = Level::ALL.iter().map(|l| l.name()).collect();
                eprintln!(
                    "candle-fused: CANDLE_FUSED_SIMD={asked} is not one of {}; using {}",
                    names.join(", "),
                    best.name()
                );
                best
            }
        }
    })
}

/// The best level that this processor has, whatever the environment asks for.
///
/// ```
/// use candle_fused::cpu::simd::{self, Level};
/// assert!(Level::available().contains(&simd::best()));
/// ```
pub fn best() -> Level {
    static BEST: OnceLock<Level> = OnceLock::new();
    *BEST.get_or_init(detect)
}

#[cfg(target_arch = "x86_64")]
fn detect() -> Level {
    let avx2 = is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c");
    let avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vnni");
    let bf16 = is_x86_feature_detected!("avx512bf16");
    match (avx2, avx512) {
        // Every processor with these tiles has bf16 without them, too, but a hypervisor may hide it.
        (true, true) if bf16 && amx::available() => Level::Amx,
        (true, true) if bf16 => Level::Avx512Bf16,
        (true, true) => Level::Avx512,
        (true, false) => Level::Avx2,
        _ => Level::Scalar,
    }
}

#[cfg(target_arch = "aarch64")]
fn detect() -> Level {
    match std::arch::is_aarch64_feature_detected!("dotprod") {
        true => Level::Dotprod,
        false => Level::Neon,
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn detect() -> Level {
    Level::Scalar
}

/// Asks for the cache line at `p`, which may be any address, in the cache of level `LEVEL`: 1, or 2, where more
/// requests may be under way than the first level has room for.
#[inline(always)]
pub(super) fn prefetch<const LEVEL: usize, T>(p: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch is part of the architecture's base and reads nothing that a program sees.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
        match LEVEL {
            1 => _mm_prefetch::<_MM_HINT_T0>(p.cast()),
            _ => _mm_prefetch::<_MM_HINT_T1>(p.cast()),
        }
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above; the intrinsic is not stable.
    unsafe {
        use std::arch::asm;
        match LEVEL {
            1 => {
                asm!("prfm pldl1keep, [{}]", in(reg) p, options(readonly, nostack, preserves_flags))
            }
            _ => {
                asm!("prfm pldl2keep, [{}]", in(reg) p, options(readonly, nostack, preserves_flags))
            }
        }
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = p;
}
