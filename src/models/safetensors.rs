//! Tensors of a `VarBuilder`: safetensors files, one or several, or whatever else is behind it.

use super::weights::{Source, arranged};
use crate::Fusion;
use crate::nn::{Embedding, LinearWeight, Projection};
use candle_core::{DType, Device, Error, Result, Tensor};
use candle_nn::VarBuilder;

/// The error of a matrix that could not be read, or where to go with a file that
/// [`save_quantized`](super::save_quantized) wrote, whose matrices are bytes in a row.
fn onward(vb: &VarBuilder<'_>, tensor: &str, error: Error) -> Error {
    let stored = vb.get_unchecked_dtype(tensor, DType::U8);
    match stored.is_ok_and(|stored| stored.rank() == 1) {
        true => Error::Msg(format!(
            "tensor `{tensor}` is quantized: `QuantizedFile::open` opens such a file, and the model's \
             `from_quantized` loads it"
        )),
        false => error,
    }
}

impl Source for VarBuilder<'_> {
    fn device(&self) -> &Device {
        VarBuilder::device(self)
    }

    fn dtype(&self) -> Option<DType> {
        Some(VarBuilder::dtype(self))
    }

    fn has(&self, tensor: &str) -> bool {
        self.contains_tensor(tensor)
    }

    fn matrix(
        &mut self,
        tensor: &str,
        rows: usize,
        cols: usize,
        heads: Option<usize>,
    ) -> Result<LinearWeight> {
        let matrix = match self.get((rows, cols), tensor) {
            Ok(matrix) => matrix,
            Err(error) => return Err(onward(self, tensor, error)),
        };
        Ok(LinearWeight::Dense(arranged(matrix, heads)?))
    }

    fn vector(&mut self, tensor: &str, len: usize) -> Result<Tensor> {
        self.get(len, tensor)
    }

    fn table(
        &mut self,
        tensor: &str,
        size: (usize, usize),
        tied: Option<&str>,
        fusion: Fusion,
    ) -> Result<(Embedding, Option<Projection>)> {
        let table = match self.get(size, tensor) {
            Ok(table) => table,
            Err(error) => return Err(onward(self, tensor, error)),
        };
        let head = match tied {
            Some(_) => {
                let weight = LinearWeight::Dense(table.clone());
                Some(Projection::new(vec![weight], None, fusion)?)
            }
            None => None,
        };
        Ok((Embedding::from_table(table), head))
    }
}
