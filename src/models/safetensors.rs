//! Tensors of a `VarBuilder`: safetensors files, one or several, or whatever else is behind it.

use super::weights::{Source, arranged};
use crate::Fusion;
use crate::nn::{Embedding, LinearWeight, Projection};
use candle_core::{Device, Result, Tensor};
use candle_nn::VarBuilder;

impl Source for VarBuilder<'_> {
    fn device(&self) -> &Device {
        VarBuilder::device(self)
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
        let matrix = self.get((rows, cols), tensor)?;
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
        let table = self.get(size, tensor)?;
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
