//! Which instruction set the cores use, decided once per process.

use std::sync::OnceLock;

/// Instruction sets that a core may have a path for, in rising order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// Plain Rust, right on every architecture.
    Scalar,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, VL, DQ and VNNI.
    Avx512,
}

impl Level {
    /// Every level that this processor can run, lowest first.
    ///
    /// Tests use it to run each path that can be run here; `CANDLE_FUSED_SIMD` does not narrow it.
    pub fn available() -> Vec<Level> {
        [Level::Scalar, Level::Avx2, Level::Avx512]
            .into_iter()
            .filter(|l| *l <= best())
            .collect()
    }

    /// This level, or the best that the processor has where it lacks this one.
    ///
    /// A core that takes a level as an argument asks this before it enters code for that level, so
    /// that no argument can make it execute instructions that do not exist.
    pub fn supported(self) -> Level {
        self.min(best())
    }

    /// The name that `CANDLE_FUSED_SIMD` takes.
    pub fn name(self) -> &'static str {
        match self {
            Level::Scalar => "scalar",
            Level::Avx2 => "avx2",
            Level::Avx512 => "avx512",
        }
    }
}

/// The level in use: the best that the processor has, or less where the environment variable
/// `CANDLE_FUSED_SIMD` (`scalar`, `avx2`, `avx512`) asks for less.
pub fn level() -> Level {
    static LEVEL: OnceLock<Level> = OnceLock::new();
    *LEVEL.get_or_init(|| {
        let best = best();
        let Ok(asked) = std::env::var("CANDLE_FUSED_SIMD") else {
            return best;
        };
        match [Level::Scalar, Level::Avx2, Level::Avx512]
            .into_iter()
            .find(|l| l.name() == asked)
        {
            Some(l) => l.min(best),
            None => {
                eprintln!(
                    "candle-fused: CANDLE_FUSED_SIMD={asked} is not one of scalar, avx2, avx512; \
                     using {}",
                    best.name()
                );
                best
            }
        }
    })
}

/// The best level that this processor has, whatever the environment asks for.
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
    match (avx2, avx512) {
        (true, true) => Level::Avx512,
        (true, false) => Level::Avx2,
        _ => Level::Scalar,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn detect() -> Level {
    Level::Scalar
}
