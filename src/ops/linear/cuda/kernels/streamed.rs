//! The weights that the kernels for few rows of x on Hopper take through a pipeline in shared memory
//! (`kernels/linear/weight_stream_sm90.cuh`).

use super::super::problem::Case;
use crate::cuda::abi::{GEMV_SM90_K_BLOCKS as STAGE_K_BLOCKS, K_BLOCK, N_TILE, ROW_GROUP};
use crate::quant::{NF4_GROUP, NVFP4_GROUP, Scheme, TernaryScale};

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
}

impl Streamed {
    fn of(scheme: Scheme) -> Option<Self> {
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

    /// The place of the kernel among those of its module.
    pub(super) fn index(self) -> usize {
        match self {
            Self::Int4 { groups, zero_point } => {
                groups.trailing_zeros() as usize + if zero_point { 3 } else { 0 }
            }
            Self::Int8 => 6,
            Self::Ternary => 7,
            Self::Fp8 => 8,
            Self::Fp8Block => 9,
            Self::Nvfp4 => 10,
            Self::Nf4 => 11,
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
        };
        N_TILE * STAGE_K_BLOCKS * k_block
    }
}

/// Bytes from which on two stages keep the memory busy.
const LARGE_STAGE: usize = 24 << 10;

/// The format of the weights, if the pipeline takes them.
pub(super) fn streamed(case: &Case) -> Result<Streamed, &'static str> {
    let format = case.scheme().and_then(Streamed::of);
    let format = format.ok_or("there is no kernel of this group or scale")?;
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
    use super::Streamed;
    use crate::quant::Scheme;
    use std::str::FromStr;

    /// The source, whose kernels assert the bytes of their stages.
    const SOURCE: &str = include_str!("../../../../../kernels/linear/gemv_wna16_sm90.cu");

    #[test]
    fn stages_are_those_that_the_kernels_assert() {
        let schemes = [
            "int4-g128",
            "int4-g64",
            "int4-g32",
            "int4-g128-z",
            "int4-g64-z",
            "int4-g32-z",
            "int8",
            "ternary-row",
            "fp8",
            "fp8-block128",
            "nvfp4",
            "nf4",
        ];
        let kernels = SOURCE
            .lines()
            .filter(|line| line.starts_with("FUSED_GEMV_SM90("));
        for (i, (name, kernel)) in schemes.iter().zip(kernels).enumerate() {
            let streamed = Streamed::of(Scheme::from_str(name).unwrap()).unwrap();
            assert_eq!(streamed.index(), i, "{name}: {kernel}");
            let bytes = kernel.split(", ").nth(1).unwrap();
            assert_eq!(
                bytes,
                streamed.stage_bytes().to_string(),
                "{name}: {kernel}"
            );
        }
    }
}
