//! The tensors of a layer, which are replaced one by one.

use crate::Fusion;
use crate::models::balance::Balanced;
use crate::models::weights::{Source, arranged};
use crate::nn::pack::{named, rounded};
use crate::nn::recipe::Recipe;
use crate::nn::{Embedding, LinearWeight, Projection};
use candle_core::{DType, Device, Result, Tensor};
use std::collections::HashMap;

/// Another source's tensors in f32. They are held until [`Held::clear`], so that a layer can be put together again after
/// some of them have been replaced.
pub struct Held<'a, S> {
    source: Balanced<S>,
    recipe: &'a Recipe,
    tensors: HashMap<String, Tensor>,
}

impl<'a, S: Source> Held<'a, S> {
    pub fn new(source: Balanced<S>, recipe: &'a Recipe) -> Self {
        Self {
            source,
            recipe,
            tensors: HashMap::new(),
        }
    }

    /// A matrix that has been read already, `[rows, cols]`.
    pub fn get(&self, tensor: &str) -> Option<&Tensor> {
        self.tensors.get(tensor)
    }

    pub fn replace(&mut self, tensor: &str, by: Tensor) {
        self.tensors.insert(tensor.to_owned(), by);
    }

    pub fn clear(&mut self) {
        self.tensors.clear();
    }

    fn read(
        &mut self,
        tensor: &str,
        read: impl FnOnce(&mut Balanced<S>) -> Result<Tensor>,
    ) -> Result<Tensor> {
        if let Some(held) = self.tensors.get(tensor) {
            return Ok(held.clone());
        }
        // Weights of a model that has been trained are variables, which fused operations refuse.
        let read = read(&mut self.source)?.to_dtype(DType::F32)?.detach();
        self.tensors.insert(tensor.to_owned(), read.clone());
        Ok(read)
    }
}

impl<S: Source> Source for Held<'_, S> {
    fn device(&self) -> &Device {
        self.source.device()
    }

    fn has(&self, tensor: &str) -> bool {
        self.source.has(tensor)
    }

    fn matrix(
        &mut self,
        tensor: &str,
        rows: usize,
        cols: usize,
        heads: Option<usize>,
    ) -> Result<LinearWeight> {
        let matrix = self.read(tensor, |source| {
            arranged(source.matrix(tensor, (rows, cols))?, heads)
        })?;
        Ok(LinearWeight::Dense(matrix))
    }

    fn vector(&mut self, tensor: &str, len: usize) -> Result<Tensor> {
        self.read(tensor, |source| source.vector(tensor, len))
    }

    /// The embedding alone: no head is needed.
    fn table(
        &mut self,
        tensor: &str,
        size: (usize, usize),
        _: Option<&str>,
        _: Fusion,
    ) -> Result<(Embedding, Option<Projection>)> {
        let table = self.source.matrix(tensor, size)?;
        let table = table.to_dtype(DType::F32)?.detach();
        let table = match self.recipe.of_embedding(tensor) {
            Some(quantization) => named(tensor, rounded(&table, quantization))?,
            None => table,
        };
        Ok((Embedding::from_table(table), None))
    }
}
