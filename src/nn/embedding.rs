//! Token embeddings.

use crate::cpu::packed::PackedMatrix;
#[cfg(feature = "cuda")]
use crate::cuda::BlockMatrix;
#[cfg(feature = "cuda")]
use crate::ops::embedding::{Table, embedding};
use candle_core::{DType, Result, Tensor, bail};
use std::sync::Arc;

/// A table of rows, looked up by token id.
#[derive(Clone, Debug)]
pub enum Embedding {
    /// `[vocab, hidden]` in the model's dtype.
    Dense(Tensor),
    /// GGUF blocks, each row dequantized to f32 when it is looked up.
    Packed(Arc<PackedMatrix>),
    /// The same on a GPU.
    #[cfg(feature = "cuda")]
    Blocks(Arc<BlockMatrix>),
}

impl Embedding {
    /// Rows of the table.
    pub fn vocab_size(&self) -> usize {
        match self {
            Embedding::Dense(table) => table.dims()[0],
            Embedding::Packed(table) => table.rows(),
            #[cfg(feature = "cuda")]
            Embedding::Blocks(table) => table.rows(),
        }
    }

    /// The table on a GPU, if it is there.
    #[cfg(feature = "cuda")]
    pub(crate) fn table(&self) -> Option<Table<'_>> {
        match self {
            Embedding::Dense(table) if table.device().is_cuda() => Some(Table::Dense(table)),
            Embedding::Blocks(table) => Some(Table::Blocks(table)),
            _ => None,
        }
    }

    /// The rows of `ids` `[B, T]` (u32): `[B, T, hidden]`.
    ///
    /// # Errors
    /// If an id is not below the size of the vocabulary.
    pub fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let ids = ids.to_dtype(DType::U32)?;
        self.check(&ids.flatten_all()?.to_vec1::<u32>()?)?;
        self.rows(&ids)
    }

    /// Fails if an id is not below the size of the vocabulary.
    pub(crate) fn check(&self, ids: &[u32]) -> Result<()> {
        let vocab = self.vocab_size();
        match ids.iter().find(|id| **id as usize >= vocab) {
            Some(id) => bail!("input_ids: token {id} is out of the vocabulary of {vocab}"),
            None => Ok(()),
        }
    }

    /// The rows of ids `[B, T]` that have been checked.
    pub(crate) fn rows(&self, ids: &Tensor) -> Result<Tensor> {
        let (b, t) = ids.dims2()?;
        let flat = ids.flatten_all()?;
        #[cfg(feature = "cuda")]
        if let Some(table) = self.table() {
            return embedding(table, &flat.reshape((b, t))?);
        }
        match self {
            Embedding::Dense(table) => table.index_select(&flat, 0)?.reshape((b, t, table.dim(1)?)),
            Embedding::Packed(table) => {
                let tokens = flat.to_vec1::<u32>()?;
                let hidden = table.cols();
                let mut rows = vec![0f32; tokens.len() * hidden];
                for (id, row) in tokens.iter().zip(rows.chunks_exact_mut(hidden)) {
                    table.dequantize_row(*id as usize, row)?;
                }
                Tensor::from_vec(rows, (b, t, hidden), ids.device())
            }
            #[cfg(feature = "cuda")]
            Embedding::Blocks(_) => bail!("input_ids: expected a table on the device of the ids"),
        }
    }
}
