//! The weights that the kernels for few rows of x on Hopper take through a pipeline in shared memory
//! (`kernels/linear/weight_stream_sm90.cuh`).

use super::super::problem::{Case, WeightFormat};
use super::int4_form;
use crate::cuda::abi::{GEMV_SM90_K_BLOCKS as STAGE_K_BLOCKS, K_BLOCK, N_TILE, ROW_GROUP};
use crate::cuda::{group_bytes, kernel_index};
use crate::quant::{BlockFormat, Format, NF4_GROUP, NVFP4_GROUP, Scaling, Scheme, TernaryScale};

/// A format that there are kernels for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Streamed {
    /// With so many groups in a K block.
    Int4 {
        groups: usize,
        zero_point: bool,
    },
    Int8,
    /// With a scale for each row.
    Ternary,
    /// Likewise.
    Fp8,
    /// In blocks.
    Fp8Block,
    Nvfp4,
    Nf4,
    Gguf(BlockFormat),
}

/// Codes of 4 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Nibbles {
    /// Of a K block.
    pub groups: usize,
    /// Whether groups have zero points or offsets of their own.
    pub offsets: bool,
}

/// The kernels of one source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Codes,
    Gguf,
}

impl Streamed {
    fn of(weight: WeightFormat) -> Option<Self> {
        let WeightFormat::Quantized(format) = weight else {
            return None;
        };
        let scheme = match format {
            Format::Block(format) => return Some(Self::Gguf(format)),
            Format::Scheme(scheme) => scheme,
        };
        match scheme {
            Scheme::Int4 { group, zero_point } if K_BLOCK.is_multiple_of(group) => {
                let groups = K_BLOCK / group;
                Some(Self::Int4 { groups, zero_point })
            }
            Scheme::Int8 => Some(Self::Int8),
            Scheme::Ternary {
                scale: TernaryScale::Row | TernaryScale::Tensor,
            } => Some(Self::Ternary),
            Scheme::Fp8 => Some(Self::Fp8),
            Scheme::Fp8Block128 => Some(Self::Fp8Block),
            Scheme::Nvfp4 => Some(Self::Nvfp4),
            Scheme::Nf4 => Some(Self::Nf4),
            _ => None,
        }
    }

    /// The kernel's source, and its place there.
    pub(super) fn kernel(self) -> (Source, usize) {
        let codes = match self {
            Self::Int4 { groups, zero_point } => int4_form(K_BLOCK / groups, zero_point),
            Self::Int8 => 6,
            Self::Ternary => 7,
            Self::Fp8 => 8,
            Self::Fp8Block => 9,
            Self::Nvfp4 => 10,
            Self::Nf4 => 11,
            Self::Gguf(format) => {
                return (Source::Gguf, kernel_index(Format::Block(format)));
            }
        };
        (Source::Codes, codes)
    }

    /// Whether each code has a byte of its own, in no blocks.
    pub(super) fn codes_are_bytes(self) -> bool {
        matches!(self, Self::Int8 | Self::Fp8 | Self::Fp8Block)
    }

    /// What there is to know of codes that are all of 4 bits, which the kernels for one row multiply as int8.
    pub(super) fn nibbles(self) -> Option<Nibbles> {
        match self {
            Self::Int4 { groups, zero_point } => Some(Nibbles {
                groups,
                offsets: zero_point,
            }),
            Self::Gguf(format) if format.bits == 4 => Some(Nibbles {
                groups: K_BLOCK / 32,
                offsets: format.scaling != Scaling::Symmetric,
            }),
            _ => None,
        }
    }

    /// Stages of a pipeline at least: fewer where they are large.
    pub(super) fn least_stages(self) -> usize {
        match self.stage_bytes() {
            0..LARGE_STAGE => 3,
            _ => 2,
        }
    }

    /// Bytes of a stage: 16 K blocks of an N tile.
    pub(super) fn stage_bytes(self) -> usize {
        // Codes of 8 rows in a K block, and the scales and zero points that come with them.
        let k_block = match self {
            Self::Int4 { groups, zero_point } => {
                K_BLOCK / 2 + groups * (2 + usize::from(zero_point))
            }
            Self::Ternary => K_BLOCK / 4,
            Self::Nvfp4 => K_BLOCK / 2 + K_BLOCK / NVFP4_GROUP,
            Self::Nf4 => K_BLOCK / 2 + 4 * (K_BLOCK / NF4_GROUP),
            Self::Fp8 | Self::Fp8Block => K_BLOCK,
            Self::Int8 => return N_TILE * (STAGE_K_BLOCKS * K_BLOCK + 64),
            Self::Gguf(format) => group_bytes(&format),
        };
        N_TILE * STAGE_K_BLOCKS * k_block
    }

    /// Bytes of the sums of so many values of a row of x, which meet the weights' offsets: two bf16 parts, each twice.
    pub(super) fn x_sums(self, values: usize) -> usize {
        match self {
            Self::Gguf(format) => match format.scaling {
                Scaling::Affine | Scaling::Super => values / 32 * 8,
                Scaling::Super16 => values / 16 * 8,
                Scaling::Symmetric | Scaling::SuperSymmetric => 0,
            },
            _ => 0,
        }
    }
}

/// Bytes from which on two stages keep the memory busy.
const LARGE_STAGE: usize = 24 << 10;

/// The format of the weights, if the pipeline takes them.
pub(super) fn streamed(case: &Case) -> Result<Streamed, &'static str> {
    let format = Streamed::of(case.weight).ok_or("there is no kernel of this group or scale")?;
    if !case.k.is_multiple_of(8) {
        return Err("K is no multiple of 8");
    }
    if format == Streamed::Int8 {
        return Ok(format);
    }
    let mut first = 0;
    let row_groups = case.matrices().all(|rows| {
        first += rows;
        first == case.n() || first.is_multiple_of(ROW_GROUP)
    });
    if !row_groups || (case.gates() && !case.width().is_multiple_of(ROW_GROUP)) {
        return Err("matrices do not end with whole 8 rows");
    }
    if let Streamed::Int4 {
        groups,
        zero_point: true,
    } = format
        && !(groups * case.k.div_ceil(K_BLOCK)).is_multiple_of(2)
    {
        return Err("zero points of 8 rows are not copied in 16 bytes");
    }
    Ok(format)
}

#[cfg(test)]
mod tests {
    use super::super::super::problem::WeightFormat;
    use super::{Source, Streamed};
    use crate::quant::{BlockFormat, Format, Scheme};
    use std::str::FromStr;

    /// The sources, whose kernels assert the bytes of their stages.
    const SOURCES: [(Source, &str); 2] = [
        (
            Source::Codes,
            include_str!("../../../../../kernels/linear/gemv_wna16_sm90.cu"),
        ),
        (
            Source::Gguf,
            include_str!("../../../../../kernels/linear/gemv_wna16_sm90_gguf.cu"),
        ),
    ];

    #[test]
    fn stages_are_those_that_the_kernels_assert() {
        let schemes = [
            "int8",
            "int4-g32",
            "int4-g64",
            "int4-g128",
            "int4-g32-z",
            "int4-g64-z",
            "int4-g128-z",
            "ternary-row",
            "fp8",
            "fp8-block128",
            "nvfp4",
            "nf4",
        ];
        let schemes = schemes.map(|name| Format::Scheme(Scheme::from_str(name).unwrap()));
        let blocks =
            BlockFormat::DTYPES.map(|dtype| Format::Block(BlockFormat::of(dtype).unwrap()));
        for format in schemes.into_iter().chain(blocks) {
            let streamed = Streamed::of(WeightFormat::Quantized(format)).unwrap();
            let (source, index) = streamed.kernel();
            let (_, text) = SOURCES.iter().find(|(of, _)| *of == source).unwrap();
            let kernels = text
                .lines()
                .filter(|line| line.starts_with("FUSED_GEMV_SM90("));
            let kernel = kernels.clone().nth(index).unwrap();
            let bytes = kernel.split(", ").nth(1).unwrap();
            assert_eq!(
                bytes,
                streamed.stage_bytes().to_string(),
                "{format}: {kernel}"
            );
        }
    }
}
