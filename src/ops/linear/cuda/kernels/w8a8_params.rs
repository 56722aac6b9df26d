//! What the kernels that multiply 8 bits share: which products they take, and how the weights are passed to them.

use super::super::problem::{Case, MAX_MATRICES, Operand, Operands};
use super::gemv::{EpilogueParams, activation_index};
use super::tensor_map::{groups_map, tensor_map};
use crate::cuda::abi::{TensorMap, W8A8Weights};
pub(super) use crate::cuda::abi::{W8A8_ALIGNMENT as ALIGNMENT, W8A8Product as ProductParams};
use crate::cuda::{Address, PackedAt};
use crate::ops::view::dtype_index;
use candle_core::{Result, bail};

/// Rows begin at multiples of this many bytes.
const PIECE: usize = 16;

/// Whether a kernel takes the matrices together, and 16-byte accesses fit eight outputs and all that belongs to them.
pub(super) fn check(case: &Case) -> std::result::Result<(), &'static str> {
    let rows: Vec<_> = case.matrices().collect();
    let paired = match rows[..] {
        [_] => true,
        [gate, up] => gate == up,
        _ => false,
    };
    if case.gates() && !paired {
        return Err("the gate and what it gates are not two matrices of one size");
    }
    let mut counts = rows.iter().copied().chain([case.width()]);
    match case.alignment.outputs && counts.all(|n| n.is_multiple_of(8)) {
        true => Ok(()),
        false => Err("output channels are no multiples of 8, or outputs not aligned to 16 bytes"),
    }
}

/// k with the zeros behind it.
pub(super) fn pitch(k: usize) -> usize {
    k.next_multiple_of(PIECE)
}

/// Tiles of so many rows of W beside one another.
pub(super) fn tiles_of_w(rows: impl Iterator<Item = usize>, gates: bool, columns: usize) -> usize {
    match gates {
        true => (rows.sum::<usize>() / 2).div_ceil(columns / 2),
        false => rows.map(|rows| rows.div_ceil(columns)).sum(),
    }
}

/// The matrices, and their rows.
fn matrices(operands: &Operands) -> Result<Vec<(PackedAt, usize)>> {
    let each = operands.weights.iter().map(|weight| match weight {
        Operand::Quantized(w) => w.codes().map(|at| (at, w.rows())),
        Operand::Dense { .. } => None,
    });
    match each.collect::<Option<Vec<_>>>() {
        Some(matrices) if (1..=MAX_MATRICES).contains(&matrices.len()) => Ok(matrices),
        _ => bail!("quant_linear: expected one to {MAX_MATRICES} matrices in 8 bits"),
    }
}

/// The tensor maps of the weights, which may be `tiled` as FP8 is, the first in place of those that are not there.
pub(super) fn tensor_maps(
    operands: &Operands,
    rows_of_tile: usize,
    tiled: bool,
) -> Result<[TensorMap; MAX_MATRICES]> {
    let matrices = matrices(operands)?;
    let map = |i: usize| {
        let (at, rows) = matrices.get(i).unwrap_or(&matrices[0]);
        match tiled {
            true => groups_map(at.codes, [*rows, operands.at.k], rows_of_tile),
            false => tensor_map(at.codes, [*rows, pitch(operands.at.k)], rows_of_tile),
        }
    };
    Ok([map(0)?, map(1)?, map(2)?])
}

/// For tiles of so many rows of W, `[above, beside]` one another, of which those of `section` rows of tiles are taken
/// together.
pub(super) fn product_params(
    operands: &Operands,
    [x, x_scales]: [Address; 2],
    columns: usize,
    [m_tiles, n_tiles]: [usize; 2],
    section: usize,
) -> Result<ProductParams> {
    let at = &operands.at;
    let gates = at.activation.gate().is_some();
    let absent = W8A8Weights {
        codes: 0,
        scales: 0,
        rows: 0,
        column: 0,
        tile: u32::MAX,
        own_scales: 0,
    };
    let mut weights = [absent; MAX_MATRICES];
    let matrices = matrices(operands)?;
    let (mut column, mut tile) = (0, 0);
    for (i, (params, (codes, rows))) in weights.iter_mut().zip(&matrices).enumerate() {
        *params = W8A8Weights {
            codes: codes.codes,
            scales: codes.scales,
            rows: *rows as u32,
            column: column as u32,
            // What gates multiply is not a tile's first piece.
            tile: match gates && i > 0 {
                true => u32::MAX,
                false => tile as u32,
            },
            own_scales: (codes.zeros != 0).into(),
        };
        column += rows;
        tile += rows.div_ceil(columns);
    }
    let width = operands.width();
    let in_two = matrices.len() == 2;
    Ok(ProductParams {
        x,
        x_scales,
        weights,
        epilogue: EpilogueParams {
            bias: at.bias,
            residuals: at.residuals,
            out: at.out,
            stride: at.stride as u64,
            activation: activation_index(at.activation),
            dtype: dtype_index(at.x_dtype) as i32,
            out_dtype: dtype_index(at.out_dtype) as i32,
        },
        m: at.m as u32,
        k: pitch(at.k) as u32,
        width: width as u32,
        m_tiles: m_tiles as u32,
        n_tiles: n_tiles as u32,
        section: section as u32,
        gated_part: in_two.into(),
        gated_row: if in_two { 0 } else { width as u32 },
    })
}
