//! Token embeddings.

use crate::cpu::packed::PackedMatrix;
#[cfg(feature = "cuda")]
use crate::cuda::BlockMatrix;
#[cfg(feature = "cuda")]
use crate::ops::embedding::{Table, embedding};
#[cfg(all(feature = "cuda", target_os = "linux"))]
use crate::ops::linear::cuda::choose_early;
#[cfg(feature = "cuda")]
use crate::ops::view::float;
use candle_core::{DType, Device, Module, Result, Tensor, bail};
use std::sync::Arc;

/// A table of rows, looked up by token id.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_fused::nn::Embedding;
/// let table = Tensor::new(&[[0f32, 1.], [2., 3.]], &Device::Cpu)?;
/// let embedding = Embedding::new(table, 2);
/// let rows = embedding.forward(&Tensor::new(&[1u32, 0], &Device::Cpu)?)?;
/// assert_eq!(rows.to_vec2::<f32>()?, [[2., 3.], [0., 1.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Embedding {
    rows: Rows,
    /// The table's values, or `[0, hidden]` in their place.
    values: Tensor,
}

/// How the rows are stored.
#[derive(Clone, Debug)]
enum Rows {
    /// `[vocab, hidden]` in the model's dtype, in `values`.
    Dense,
    /// Quantized, each row turned into numbers of this dtype when it is looked up.
    Packed(Arc<PackedMatrix>, DType),
    /// The same on a GPU.
    #[cfg(feature = "cuda")]
    Blocks(Arc<BlockMatrix>, DType),
}

/// A model whose rows have this dtype is being loaded to the device.
fn on_gpu(device: &Device, dtype: DType) {
    #[cfg(all(feature = "cuda", target_os = "linux"))]
    if let Device::Cuda(device) = device {
        choose_early(device, dtype);
    }
    let _ = (device, dtype);
}

impl Embedding {
    /// From a table `[vocab, hidden_size]`, which is what counts: `hidden_size` is there for
    /// candle_nn's signature.
    pub fn new(embeddings: Tensor, hidden_size: usize) -> Self {
        let _ = hidden_size;
        Self::from_table(embeddings)
    }

    /// From a table `[vocab, hidden]`.
    pub(crate) fn from_table(values: Tensor) -> Self {
        on_gpu(values.device(), values.dtype());
        Self {
            rows: Rows::Dense,
            values,
        }
    }

    /// From a quantized table on the CPU. Rows are turned into `dtype` when they are looked up.
    ///
    /// # Errors
    /// If `dtype` is none that candle can make tensors of.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_fused::cpu::packed::PackedMatrix;
    /// use candle_fused::nn::Embedding;
    /// use candle_fused::quant::{Scheme, quantize};
    /// use std::sync::Arc;
    /// let codes = quantize(&[0.5; 4 * 32], 4, 32, Scheme::Int8)?;
    /// let embedding = Embedding::from_packed(Arc::new(PackedMatrix::from_codes(&codes)?), DType::F32)?;
    /// assert!(embedding.is_quantized() && embedding.vocab_size() == 4 && embedding.hidden_size() == 32);
    /// // Codes are no tensor.
    /// assert_eq!(embedding.embeddings().dims(), [0, 32]);
    /// let row = embedding.forward(&Tensor::new(&[3u32], &Device::Cpu)?)?;
    /// assert!((row - 0.5)?.abs()?.max_all()?.to_scalar::<f32>()? < 1e-6);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn from_packed(table: Arc<PackedMatrix>, dtype: DType) -> Result<Self> {
        Ok(Self {
            values: Tensor::zeros((0, table.cols()), dtype, &Device::Cpu)?,
            rows: Rows::Packed(table, dtype),
        })
    }

    /// From a quantized table on a GPU. Rows are turned into `dtype` when they are looked up.
    ///
    /// # Errors
    /// If `dtype` is not f32, f16 or bf16.
    ///
    /// ```no_run
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_fused::cuda::BlockMatrix;
    /// use candle_fused::nn::Embedding;
    /// use candle_fused::quant::{Scheme, quantize};
    /// use std::sync::Arc;
    /// let device = Device::new_cuda(0)?;
    /// let codes = quantize(&[0.5; 4 * 32], 4, 32, Scheme::Int8)?;
    /// let table = Arc::new(BlockMatrix::from_codes(&codes, &device)?);
    /// let embedding = Embedding::from_blocks(table, DType::BF16)?;
    /// let row = embedding.forward(&Tensor::new(&[3u32], &device)?)?;
    /// assert_eq!(row.dims(), [1, 32]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    #[cfg(feature = "cuda")]
    pub fn from_blocks(table: Arc<BlockMatrix>, dtype: DType) -> Result<Self> {
        float("embedding", "dtype", dtype)?;
        on_gpu(table.device(), dtype);
        Ok(Self {
            values: Tensor::zeros((0, table.cols()), dtype, &Device::Cpu)?,
            rows: Rows::Blocks(table, dtype),
        })
    }

    /// The table `[vocab, hidden]`, as a head that is tied to it takes it. A quantized one is no tensor;
    /// `[0, hidden]` stands for it.
    pub fn embeddings(&self) -> &Tensor {
        &self.values
    }

    /// Whether the table is quantized.
    pub fn is_quantized(&self) -> bool {
        !matches!(self.rows, Rows::Dense)
    }

    /// Columns of the table.
    pub fn hidden_size(&self) -> usize {
        self.values.dims().get(1).copied().unwrap_or(0)
    }

    /// Rows of the table.
    pub fn vocab_size(&self) -> usize {
        match &self.rows {
            Rows::Dense => self.values.dims().first().copied().unwrap_or(0),
            Rows::Packed(table, _) => table.rows(),
            #[cfg(feature = "cuda")]
            Rows::Blocks(table, _) => table.rows(),
        }
    }

    /// The table on a GPU, if it is there.
    #[cfg(feature = "cuda")]
    pub(crate) fn table(&self) -> Option<Table<'_>> {
        match &self.rows {
            Rows::Dense if self.values.device().is_cuda() => Some(Table::Dense(&self.values)),
            Rows::Blocks(table, dtype) => Some(Table::Blocks(table, *dtype)),
            _ => None,
        }
    }

    /// The rows of `ids` (u8, u32 or i64, any shape): their shape and the width.
    ///
    /// # Errors
    /// If an id is not below the size of the vocabulary, or the ids are not whole numbers.
    pub fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        if self.values.rank() != 2 {
            bail!(
                "embedding: the table has shape {:?}, expected [vocab, hidden]",
                self.values.shape()
            );
        }
        let ids = match ids.dtype() {
            DType::U32 | DType::U8 => ids.to_dtype(DType::U32)?,
            DType::I64 => {
                let wide = ids.flatten_all()?.to_vec1::<i64>()?;
                let narrow = wide.iter().map(|id| u32::try_from(*id).unwrap_or(u32::MAX));
                Tensor::from_iter(narrow, ids.device())?.reshape(ids.dims())?
            }
            other => bail!("input_ids: {other:?}, expected u32, u8 or i64"),
        };
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

    /// The rows of ids that have been checked.
    pub(crate) fn rows(&self, ids: &Tensor) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if let Some(table) = self.table() {
            return embedding(table, ids);
        }
        let hidden = self.hidden_size();
        let shape = [ids.dims(), &[hidden]].concat();
        let flat = ids.flatten_all()?;
        match &self.rows {
            Rows::Dense => self.values.index_select(&flat, 0)?.reshape(shape),
            Rows::Packed(table, dtype) => {
                let tokens = flat.to_vec1::<u32>()?;
                let mut rows = vec![0f32; tokens.len() * hidden];
                for (id, row) in tokens.iter().zip(rows.chunks_exact_mut(hidden)) {
                    table.dequantize_row(*id as usize, row)?;
                }
                Tensor::from_vec(rows, shape, ids.device())?.to_dtype(*dtype)
            }
            #[cfg(feature = "cuda")]
            Rows::Blocks(..) => bail!("input_ids: expected a table on the device of the ids"),
        }
    }
}

impl Module for Embedding {
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        Embedding::forward(self, ids)
    }
}
