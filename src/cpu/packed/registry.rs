//! Which kernel multiplies a format at a level: the one place where that is chosen. `tests/data/cpu_kernels.*.txt`
//! have the choice written out, and a test compares them.

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use super::codes::{Eight, Five, Float4, Float8, Four, NormalFloat4, Six, Ternary, Three, Two};
#[cfg(target_arch = "x86_64")]
use super::kernel::Dequantize;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use super::kernel::{Codes, Kernels, Scales, Tiles, Unpack};
#[cfg(target_arch = "aarch64")]
use super::neon;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use super::scales::{
    Affine, ByGroup, ByRow, ByTwoBlocks, OfFloats, RowAndGroup16, Super, Super16, SuperSymmetric,
    Symmetric,
};
#[cfg(target_arch = "x86_64")]
use super::{
    q8::TOGETHER,
    x86::{amx, avx2, avx512, ternary::OneToken, ternary_avx2, ternary_avx512},
};
use crate::cpu::simd::Level;
use crate::quant::Format;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use crate::quant::Scheme;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use candle_core::quantized::GgmlDType;

/// Tokens from which on unpacking a row group first is faster than unpacking it in every tile.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const UNPACK_FROM: usize = 16;

/// The activations of a product.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, reason = "elsewhere no kernel asks for all of it")
)]
pub(super) struct Tokens {
    /// Those that are multiplied with a row group at a time.
    pub count: usize,
    /// Whether there is no other in the matrix of activations.
    pub only: bool,
    /// Whether there are tables to look sums up in.
    pub tables: bool,
    /// Whether each 128 values have one scale.
    pub wide: bool,
    /// Whether they have two parts.
    pub fine: bool,
    /// Whether they are in AMX's tiles, too.
    pub tiles: bool,
}

/// A kernel for a product.
#[derive(Clone, Copy)]
pub(super) struct Kernel {
    pub name: &'static str,
    pub run: Run,
}

/// How a kernel is run.
#[derive(Clone, Copy)]
pub(super) enum Run {
    /// The plain path.
    Scalar,
    /// In tiles of some tokens.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    Tiles(Tiles),
    /// The same, of weights that are unpacked first.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    Unpacked(Unpack, Tiles),
    /// In AMX's tiles, of weights that are dequantized first.
    #[cfg(target_arch = "x86_64")]
    Amx(Dequantize),
    /// A single token at once.
    #[cfg(target_arch = "x86_64")]
    OneToken(OneToken),
}

/// The kernel for weights of `format` and activations `x` at a level that the processor has.
pub(super) fn select(format: &Format, level: Level, x: Tokens) -> Kernel {
    #[cfg(target_arch = "x86_64")]
    if let Some(kernel) = one_token(format, level.without_tiles(), x) {
        return kernel;
    }
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    if let Some(kernels) = tiles(format, level) {
        #[cfg(target_arch = "x86_64")]
        if let Some(dequantize) = kernels.dequantize.filter(|_| x.tiles) {
            return Kernel {
                name: "amx_tiles",
                run: Run::Amx(dequantize[usize::from(x.fine)]),
            };
        }
        let [packed, unpacked] = kernels.names;
        let two_parts = usize::from(x.fine);
        return match kernels.unpacked {
            Some((unpack, tiles)) if x.count >= UNPACK_FROM => Kernel {
                name: unpacked,
                run: Run::Unpacked(unpack, tiles[two_parts]),
            },
            _ => Kernel {
                name: packed,
                run: Run::Tiles(kernels.packed[two_parts]),
            },
        };
    }
    let _ = (format, level, x);
    Kernel {
        name: "scalar",
        run: Run::Scalar,
    }
}

/// Of ternary weights with the only token.
#[cfg(target_arch = "x86_64")]
fn one_token(format: &Format, level: Level, x: Tokens) -> Option<Kernel> {
    let Format::Scheme(scheme @ Scheme::Ternary { .. }) = format else {
        return None;
    };
    if !x.only || x.fine {
        return None;
    }
    let (name, kernel): (_, OneToken) = match (level, x.tables, scheme.group(), x.wide) {
        (Level::Avx2, true, None, true) => (
            "avx2_lookup_wide",
            ternary_avx2::one_token::<ByRow, TOGETHER>,
        ),
        (Level::Avx2, true, None, false) => ("avx2_lookup", ternary_avx2::one_token::<ByRow, 1>),
        (Level::Avx2, true, Some(32), _) => (
            "avx2_lookup",
            ternary_avx2::one_token::<ByGroup<1, false>, 1>,
        ),
        (Level::Avx2, true, Some(64), _) => (
            "avx2_lookup",
            ternary_avx2::one_token::<ByGroup<2, false>, 1>,
        ),
        (Level::Avx2, true, Some(128), true) => (
            "avx2_lookup_wide",
            ternary_avx2::one_token::<ByGroup<4, false>, TOGETHER>,
        ),
        (Level::Avx2, true, Some(128), false) => (
            "avx2_lookup",
            ternary_avx2::one_token::<ByGroup<4, false>, 1>,
        ),
        (Level::Avx512, _, None, true) => ("avx512_in_bytes", ternary_avx512::one_token::<ByRow>),
        (Level::Avx512, _, Some(128), true) => (
            "avx512_in_bytes",
            ternary_avx512::one_token::<ByGroup<4, false>>,
        ),
        _ => return None,
    };
    Some(Kernel {
        name,
        run: Run::OneToken(kernel),
    })
}

/// The tiles of a format at a level; none at the scalar level or for an unsupported type.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn tiles(format: &Format, level: Level) -> Option<&'static Kernels> {
    match format {
        Format::Block(format) => match format.dtype {
            GgmlDType::Q4_0 => of::<Four, Symmetric>(level),
            GgmlDType::Q4_1 => of::<Four, Affine>(level),
            GgmlDType::Q5_0 => of::<Five, Symmetric>(level),
            GgmlDType::Q5_1 => of::<Five, Affine>(level),
            GgmlDType::Q8_0 => of::<Eight, Symmetric>(level),
            GgmlDType::Q2K => of::<Two, Super16>(level),
            GgmlDType::Q3K => of::<Three, SuperSymmetric>(level),
            GgmlDType::Q4K => of::<Four, Super>(level),
            GgmlDType::Q5K => of::<Five, Super>(level),
            GgmlDType::Q6K => of::<Six, SuperSymmetric>(level),
            _ => None,
        },
        Format::Scheme(Scheme::Int8) => of::<Eight, ByRow>(level),
        Format::Scheme(Scheme::Fp8) => of::<Float8, OfFloats<0>>(level),
        Format::Scheme(Scheme::Fp8Block128) => of::<Float8, OfFloats<4>>(level),
        Format::Scheme(Scheme::Nvfp4) => of::<Float4, RowAndGroup16>(level),
        Format::Scheme(Scheme::Nf4) => of::<NormalFloat4, ByTwoBlocks>(level),
        Format::Scheme(Scheme::Int4 { group, zero_point }) => match (group, zero_point) {
            (32, false) => of::<Four, ByGroup<1, false>>(level),
            (64, false) => of::<Four, ByGroup<2, false>>(level),
            (128, false) => of::<Four, ByGroup<4, false>>(level),
            (32, true) => of::<Four, ByGroup<1, true>>(level),
            (64, true) => of::<Four, ByGroup<2, true>>(level),
            (128, true) => of::<Four, ByGroup<4, true>>(level),
            _ => None,
        },
        Format::Scheme(scheme @ Scheme::Ternary { .. }) => match scheme.group() {
            None => of::<Ternary, ByRow>(level),
            Some(32) => of::<Ternary, ByGroup<1, false>>(level),
            Some(64) => of::<Ternary, ByGroup<2, false>>(level),
            Some(128) => of::<Ternary, ByGroup<4, false>>(level),
            _ => None,
        },
    }
}

/// The tiles for codes C with scales S.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn of<C: Codes + 'static, S: Scales + 'static>(level: Level) -> Option<&'static Kernels> {
    match level {
        Level::Scalar => None,
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => Some(avx2::kernels::<C, S>()),
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 | Level::Avx512Bf16 => Some(avx512::kernels::<C, S>()),
        #[cfg(target_arch = "x86_64")]
        Level::Amx => Some(amx::kernels::<C, S>()),
        #[cfg(target_arch = "aarch64")]
        Level::Neon => Some(neon::neon_kernels::<C, S>()),
        #[cfg(target_arch = "aarch64")]
        Level::Dotprod => Some(neon::dotprod_kernels::<C, S>()),
    }
}

#[cfg(all(test, any(target_arch = "x86_64", target_arch = "aarch64")))]
mod tests {
    use super::*;
    use crate::cpu::packed::scheme_tests::schemes;
    use crate::quant::BlockFormat;
    use std::fmt::Write;

    const fn case(count: usize, only: bool, tables: bool, wide: bool) -> Tokens {
        Tokens {
            count,
            only,
            tables,
            wide,
            fine: false,
            tiles: false,
        }
    }

    /// What products are asked for with; a kernel for one token of several is that for 2 to 15.
    const CASES: &[(&str, Tokens)] = &[
        ("M=1", case(1, true, false, false)),
        ("M=1, wide", case(1, true, false, true)),
        ("M=1, tables", case(1, true, true, false)),
        ("M=1, tables, wide", case(1, true, true, true)),
        ("M=2..15", case(15, false, false, false)),
        ("M>=16", case(16, false, false, false)),
        #[cfg(target_arch = "x86_64")]
        (
            "M>=32, AMX's tiles",
            Tokens {
                tiles: true,
                ..case(32, false, false, false)
            },
        ),
    ];

    /// A line for each format and level, with a column for each case.
    fn table() -> String {
        let blocks = BlockFormat::DTYPES.map(|dtype| BlockFormat::of(dtype).unwrap().into());
        let formats = blocks
            .into_iter()
            .chain(schemes().into_iter().map(Format::from));
        let mut text = String::from("format          level  ");
        for (case, _) in CASES {
            write!(text, "  {case:<21}").unwrap();
        }
        for format in formats {
            for level in Level::ALL {
                let name = format.to_string();
                write!(text, "\n{name:<15} {:<7}", level.name()).unwrap();
                for (_, tokens) in CASES {
                    let kernel = select(&format, *level, *tokens).name;
                    write!(text, "  {kernel:<21}").unwrap();
                }
            }
        }
        let lines = text.lines().map(str::trim_end);
        lines.flat_map(|line| [line, "\n"]).collect()
    }

    #[test]
    fn kernels_are_those_of_the_committed_table() {
        let arch = std::env::consts::ARCH;
        let path = format!(
            "{}/tests/data/cpu_kernels.{arch}.txt",
            env!("CARGO_MANIFEST_DIR")
        );
        let (now, path) = (table(), std::path::Path::new(&path));
        if std::env::var_os("CANDLE_FUSED_WRITE_TABLES").is_some() {
            std::fs::write(path, &now).unwrap();
        }
        let committed = std::fs::read_to_string(path).unwrap();
        assert!(
            now == committed,
            "{} differs from what is chosen now; if that is meant, write it anew with \
             CANDLE_FUSED_WRITE_TABLES=1 and commit it:\n{now}",
            path.display()
        );
    }
}
