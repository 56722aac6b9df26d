//! Right results at places spread over a whole result: a float64 reference of all of it would take
//! longer than everything that is measured.

use candle_core::{DType, Device, Result, Tensor, bail};
use common::distance::Distance;

/// Values of a result `[rows, width]` at some rows and columns.
#[derive(Clone)]
pub struct Expected {
    pub rows: Vec<usize>,
    pub cols: Vec<usize>,
    /// `rows` by `cols`.
    pub values: Vec<f64>,
    /// The largest error, relative to the largest value.
    pub limit: f64,
}

/// At most `most` places of `count`, evenly spread, the first and last among them.
pub fn spread(count: usize, most: usize) -> Vec<usize> {
    match count.min(most) {
        0 => Vec::new(),
        1 => vec![0],
        n => (0..n).map(|i| i * (count - 1) / (n - 1)).collect(),
    }
}

/// The rows of a matrix at `places`, on the host.
pub fn rows_of(t: &Tensor, places: &[usize]) -> Result<Tensor> {
    let rows = places.iter().map(|i| t.narrow(0, *i, 1));
    Tensor::cat(&rows.collect::<Result<Vec<_>>>()?, 0)?.to_device(&Device::Cpu)
}

impl Expected {
    /// Of a reference of the picked rows at all `width` columns.
    pub fn of_rows(rows: Vec<usize>, width: usize, values: Vec<f64>, limit: f64) -> Self {
        let cols = (0..width).collect();
        Self {
            rows,
            cols,
            values,
            limit,
        }
    }

    /// Fails if `got` is wrong at one of the places.
    pub fn check(&self, who: &str, got: &Tensor) -> Result<()> {
        let width = got.dims().last().copied().unwrap_or(1).max(1);
        // Tokens have no width of their own.
        let width = if self.cols.len() == 1 { 1 } else { width };
        let got = got.contiguous()?.reshape(((), width))?;
        let last = |places: &[usize]| places.last().copied().unwrap_or(0);
        if last(&self.rows) >= got.dim(0)? || last(&self.cols) >= width {
            bail!(
                "{who}: a result of shape {:?}, where row {} and column {} were expected",
                got.shape(),
                last(&self.rows),
                last(&self.cols)
            );
        }
        let got = rows_of(&got, &self.rows)?
            .to_dtype(DType::F64)?
            .to_vec2::<f64>()?;
        let picked: Vec<f64> = got
            .iter()
            .flat_map(|row| self.cols.iter().map(|col| row[*col]))
            .collect();
        let Distance { largest, top, .. } =
            Distance::of(&picked, &self.values).map_err(|e| e.context(who.to_owned()))?;
        if largest > self.limit * top.max(1e-30) {
            bail!("{who}: {largest} away from the reference (values up to {top})");
        }
        Ok(())
    }
}
