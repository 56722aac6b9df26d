//! The triangular factor of the inverse of a symmetric matrix.

use crate::pool;
use candle_core::{Device, Result, Tensor};

/// Columns that are factorized one by one; all else is matrix products.
const BLOCK: usize = 64;

/// The factor N of `H⁻¹ = Nᵀ N` that [`Hessian::inverse`](super::Hessian::inverse) gives.
#[derive(Clone)]
pub struct InverseFactor {
    /// The columns of the layer in the order of N's, which are visited from the last to the first.
    pub(super) order: Vec<usize>,
    /// N, `[K, K]` in f64, lower triangular.
    pub(super) lower: Tensor,
}

impl InverseFactor {
    /// How much an error in each column of the layer counts: `1 / N[k, k]²`, what it costs once all columns that are
    /// visited behind it have made up for it as well as they can; over the largest.
    pub(super) fn counts(&self) -> Result<Vec<f32>> {
        let n = self.order.len();
        let mut costs = vec![0f64; n];
        for (at, k) in self.order.iter().enumerate() {
            let diagonal = self.lower.narrow(0, at, 1)?.narrow(1, at, 1)?;
            costs[*k] = diagonal.flatten_all()?.to_vec1::<f64>()?[0].powi(-2);
        }
        let most = costs.iter().fold(0f64, |most, cost| most.max(*cost));
        Ok(costs.iter().map(|cost| (cost / most) as f32).collect())
    }
}

impl std::fmt::Debug for InverseFactor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "InverseFactor({} inputs)", self.order.len())
    }
}

/// `R⁻¹` of `A = R Rᵀ`, A `[n, n]` being given by its lower triangle with zeros above it; or the place at which A is
/// not positive definite.
pub(super) fn factorize(lower: Vec<f64>, n: usize) -> Result<std::result::Result<Tensor, usize>> {
    let matrix = Tensor::from_vec(lower, (n, n), &Device::Cpu)?;
    if let Err(at) = cholesky(&matrix, n)? {
        return Ok(Err(at));
    }
    invert(&matrix, n)?;
    Ok(Ok(matrix))
}

/// Rows `rows` and columns `cols` of a matrix, from the first on so many.
fn view(matrix: &Tensor, rows: (usize, usize), cols: (usize, usize)) -> Result<Tensor> {
    matrix.narrow(0, rows.0, rows.1)?.narrow(1, cols.0, cols.1)
}

fn values(matrix: &Tensor) -> Result<Vec<f64>> {
    matrix.contiguous()?.flatten_all()?.to_vec1()
}

/// R of `A = R Rᵀ` in place of A's lower triangle, a panel of columns after the other (left-looking).
fn cholesky(matrix: &Tensor, n: usize) -> Result<std::result::Result<(), usize>> {
    for first in (0..n).step_by(BLOCK) {
        let (len, below) = (BLOCK.min(n - first), n - first);
        let mut panel = view(matrix, (first, below), (first, len))?;
        if first > 0 {
            let known = view(matrix, (first, below), (0, first))?;
            let own = view(matrix, (first, len), (0, first))?;
            panel = (panel - known.matmul(&own.t()?)?)?;
        }
        // With zeros above the diagonal.
        let mut column = vec![0f64; first * len];
        column.append(&mut values(&panel)?);
        let (top, rest) = column[first * len..].split_at_mut(len * len);
        if let Err(at) = cholesky_of_block(top, len) {
            return Ok(Err(first + at));
        }
        // Each row r of the rest becomes x of x topᵀ = r.
        pool::for_rows(rest, len, 16, |_, rows| {
            for row in rows.chunks_exact_mut(len) {
                for j in 0..len {
                    let (known, open) = row.split_at_mut(j);
                    open[0] = (open[0] - dot(known, &top[j * len..])) / top[j * len + j];
                }
            }
        });
        let column = Tensor::from_vec(column, (n, len), &Device::Cpu)?;
        matrix.slice_set(&column, 1, first)?;
    }
    Ok(Ok(()))
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// The same of a small matrix, row by row; zeros are left above the diagonal.
fn cholesky_of_block(block: &mut [f64], n: usize) -> std::result::Result<(), usize> {
    for i in 0..n {
        let (above, row) = block.split_at_mut(i * n);
        let row = &mut row[..n];
        for j in 0..i {
            let (known, open) = row.split_at_mut(j);
            open[0] = (open[0] - dot(known, &above[j * n..])) / above[j * n + j];
        }
        let rest = row[i] - dot(&row[..i], &row[..i]);
        if !(rest > 0. && rest.is_finite()) {
            return Err(i);
        }
        row[i] = rest.sqrt();
        row[i + 1..].fill(0.);
    }
    Ok(())
}

/// `R⁻¹` in place of R, a panel of rows after the other: `-D⁻¹ (R[rows, before] R⁻¹[before]) | D⁻¹`, D being the
/// panel's block on the diagonal.
fn invert(matrix: &Tensor, n: usize) -> Result<()> {
    for first in (0..n).step_by(BLOCK) {
        let len = BLOCK.min(n - first);
        let block = values(&view(matrix, (first, len), (first, len))?)?;
        let inverse = Tensor::from_vec(inverse_of_block(&block, len), (len, len), &Device::Cpu)?;
        let mut parts = Vec::new();
        if first > 0 {
            let before = view(matrix, (0, first), (0, first))?;
            let product = view(matrix, (first, len), (0, first))?.matmul(&before)?;
            parts.push(inverse.matmul(&product)?.neg()?);
        }
        parts.push(inverse);
        let behind = n - first - len;
        if behind > 0 {
            parts.push(view(matrix, (first, len), (first + len, behind))?.contiguous()?);
        }
        matrix.slice_set(&Tensor::cat(&parts, 1)?, 0, first)?;
    }
    Ok(())
}

fn inverse_of_block(block: &[f64], n: usize) -> Vec<f64> {
    let mut inverse = vec![0f64; n * n];
    for i in 0..n {
        let (above, row) = inverse.split_at_mut(i * n);
        let diagonal = block[i * n + i];
        for k in 0..i {
            let factor = block[i * n + k] / diagonal;
            for (value, other) in row[..=k].iter_mut().zip(&above[k * n..]) {
                *value -= factor * other;
            }
        }
        row[i] = 1. / diagonal;
    }
    inverse
}

#[cfg(test)]
mod tests {
    use super::{factorize, values};
    use candle_core::{Device, Result, Tensor};

    #[test]
    fn the_factor_inverts() -> Result<()> {
        for n in [1, 2, 63, 64, 65, 200] {
            // Columns that are alike, and a diagonal.
            let a = Tensor::randn(0f64, 1., (n, n), &Device::Cpu)?;
            let eye = Tensor::eye(n, candle_core::DType::F64, &Device::Cpu)?;
            let matrix = (a.matmul(&a.t()?)? + (&eye * 0.1)?)?;
            let lower: Vec<f64> = values(&matrix)?
                .into_iter()
                .enumerate()
                .map(|(at, v)| if at % n <= at / n { v } else { 0. })
                .collect();
            let factor = factorize(lower, n)?.expect("positive definite");
            let product = factor.matmul(&matrix)?.matmul(&factor.t()?)?;
            let error = (product - eye)?.abs()?.max_all()?.to_scalar::<f64>()?;
            assert!(error < 1e-9, "{n}: {error}");
        }
        let at = factorize(vec![1., 0., 1., 1.], 2)?.expect_err("singular");
        assert_eq!(at, 1);
        Ok(())
    }
}
