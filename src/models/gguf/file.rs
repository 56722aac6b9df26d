//! The tensors of a GGUF file.

use super::header::{Header, shape_of};
use crate::Fusion;
use crate::cpu::packed::{PackedMatrix, ROW_GROUP, SharedBytes};
#[cfg(feature = "cuda")]
use crate::cuda::BlockMatrix;
use crate::models::shape::Long;
use crate::models::weights::Source;
use crate::nn::{Embedding, LinearWeight, Projection, numbers};
use crate::ops::Weight;
use crate::quant::{self, BlockFormat};
use candle_core::quantized::gguf_file::Content;
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Result, Tensor, bail};
use std::io::{Read, Seek, SeekFrom};
use std::sync::Arc;

/// A file being read.
pub struct File<'a, R> {
    pub ct: &'a Content,
    pub reader: &'a mut R,
    pub device: &'a Device,
    /// The whole file, where blocks are to stay in it.
    in_place: Option<&'a SharedBytes>,
    /// Whether products take blocks as they are.
    multiplies_blocks: bool,
    /// Of activations, and so of norms and of what is no block.
    dtype: DType,
    /// What is read at a time.
    part: Vec<u8>,
}

/// Bytes of a tensor that are read at a time to be packed: what the second-level cache keeps.
const PART: usize = 256 << 10;

impl<'a, R> File<'a, R> {
    /// For a model with activations in f32 that computes with blocks if `multiplies_blocks`.
    pub fn new(
        ct: &'a Content,
        reader: &'a mut R,
        device: &'a Device,
        multiplies_blocks: bool,
    ) -> Self {
        Self {
            ct,
            reader,
            device,
            in_place: None,
            multiplies_blocks,
            dtype: DType::F32,
            part: Vec::new(),
        }
    }

    /// With activations in f32, f16 or bf16.
    pub fn with_dtype(self, dtype: DType) -> Self {
        Self { dtype, ..self }
    }

    /// With blocks that stay in `file`.
    pub fn staying_in(self, file: &'a SharedBytes) -> Self {
        Self {
            in_place: Some(file),
            ..self
        }
    }
}

impl<R: Seek + Read> File<'_, R> {
    /// What keys and values are stored in.
    pub fn cache_dtype(&self, fusion: Fusion) -> DType {
        let mut infos = self.ct.tensor_infos.values();
        let blocks = infos.any(|info| quant::supports(info.ggml_dtype));
        match self.dtype {
            DType::F32 => cache_dtype(blocks, self.device, fusion),
            dtype => dtype,
        }
    }

    /// Llama 3.1 and later: the smoothing of frequencies, written out as divisors.
    pub(super) fn scale(&mut self, frequencies: &mut [f32]) -> Result<()> {
        if self.has("rope_freqs.weight") {
            let factors = self.on_cpu("rope_freqs.weight", frequencies.len())?;
            frequencies
                .iter_mut()
                .zip(factors.to_vec1::<f32>()?)
                .for_each(|(f, factor)| *f /= factor);
        }
        Ok(())
    }

    /// LongRoPE: factors of the frequencies, for short sequences and for long ones.
    pub(super) fn long(
        &mut self,
        header: &Header,
        frequencies: &mut [f32],
    ) -> Result<Option<Long>> {
        let Some((from, magnitude)) = header.long else {
            return Ok(None);
        };
        let mut divided = |name: &str| -> Result<Vec<f32>> {
            let factors = self.on_cpu(name, frequencies.len())?.to_vec1::<f32>()?;
            Ok(frequencies
                .iter()
                .zip(factors)
                .map(|(f, by)| f / by)
                .collect())
        };
        let long = divided("rope_factors_long.weight")?;
        let short = divided("rope_factors_short.weight")?;
        frequencies.copy_from_slice(&short);
        Ok(Some(Long {
            frequencies: long,
            from,
            magnitude,
        }))
    }

    /// A matrix that is packed or stays in the file, if it is to and the file has its shape.
    fn packed(
        &mut self,
        name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<Option<Arc<PackedMatrix>>> {
        let packs = self.multiplies_blocks && self.device.is_cpu();
        let info = match self.ct.tensor_infos.get(name) {
            Some(info) if packs && info.shape.dims() == [rows, cols] => info,
            _ => return Ok(None),
        };
        if !quant::supports(info.ggml_dtype) {
            return Ok(None);
        }
        let start = self.ct.tensor_data_offset.saturating_add(info.offset);
        let matrix = match self.in_place {
            Some(file) => {
                let start = usize::try_from(start).unwrap_or(usize::MAX);
                PackedMatrix::in_place(info.ggml_dtype, rows, cols, Arc::clone(file), start)
            }
            None => self.read(info.ggml_dtype, (rows, cols), start),
        };
        match matrix {
            Ok(matrix) => Ok(Some(Arc::new(matrix))),
            Err(e) => bail!("gguf: tensor `{name}`: {e}"),
        }
    }

    /// A matrix on a GPU, where blocks go as they are read, if they are to stay blocks and the file has its shape.
    #[cfg(feature = "cuda")]
    fn on_gpu(&mut self, name: &str, rows: usize, cols: usize) -> Result<Option<Arc<BlockMatrix>>> {
        let stay = self.multiplies_blocks && self.device.is_cuda();
        let (dtype, start) = match self.ct.tensor_infos.get(name) {
            Some(info) if stay && rows * cols > 0 && info.shape.dims() == [rows, cols] => (
                info.ggml_dtype,
                self.ct.tensor_data_offset.saturating_add(info.offset),
            ),
            _ => return Ok(None),
        };
        if !quant::supports(dtype) {
            return Ok(None);
        }
        let matrix = self
            .seek_blocks(dtype, (rows, cols), start)
            .and_then(|_| BlockMatrix::read(dtype, (rows, cols), self.reader, self.device));
        match matrix {
            Ok(matrix) => Ok(Some(Arc::new(matrix))),
            Err(e) => bail!("gguf: tensor `{name}`: {e}"),
        }
    }

    /// Goes to where a matrix begins, and gives the bytes of a row.
    fn seek_blocks(
        &mut self,
        dtype: GgmlDType,
        (rows, cols): (usize, usize),
        start: u64,
    ) -> Result<usize> {
        let row = BlockFormat::of(dtype)?.row_bytes(cols)?;
        let end = self.reader.seek(SeekFrom::End(0))?;
        let there = end.saturating_sub(start);
        if (row as u64)
            .checked_mul(rows as u64)
            .is_none_or(|size| size > there)
        {
            bail!("{rows} rows of {row} bytes, but {there} are left; the file may be cut short");
        }
        self.reader.seek(SeekFrom::Start(start))?;
        Ok(row)
    }

    /// Packs a matrix as it is read, so that its blocks are never held as a whole.
    fn read(
        &mut self,
        dtype: GgmlDType,
        (rows, cols): (usize, usize),
        start: u64,
    ) -> Result<PackedMatrix> {
        let row = self.seek_blocks(dtype, (rows, cols), start)?;
        let mut builder = PackedMatrix::builder(dtype, rows, cols)?;
        let step = (PART / row).max(1).next_multiple_of(ROW_GROUP);
        for first in (0..rows).step_by(step) {
            let some = step.min(rows - first);
            self.part.resize(some * row, 0);
            self.reader.read_exact(&mut self.part)?;
            builder.push(some, &self.part)?;
        }
        builder.finish()
    }

    fn blocks(&mut self, name: &str, rows: usize, cols: usize) -> Result<QTensor> {
        let dims = shape_of(self.ct, name)?;
        if dims != [rows, cols] {
            bail!(
                "gguf: tensor `{name}` has shape {dims:?}, the metadata asks for [{rows}, {cols}]"
            );
        }
        self.any(name, self.device)
    }

    /// On the CPU: what is made of it there needs no kernel of candle's, which the driver would have
    /// to compile first.
    fn on_cpu(&mut self, name: &str, len: usize) -> Result<Tensor> {
        let dims = shape_of(self.ct, name)?;
        if dims != [len] {
            bail!("gguf: tensor `{name}` has shape {dims:?}, the metadata asks for [{len}]");
        }
        self.any(name, &Device::Cpu)?.dequantize(&Device::Cpu)
    }

    /// A tensor as it is stored.
    pub fn any(&mut self, name: &str, device: &Device) -> Result<QTensor> {
        let dims = shape_of(self.ct, name)?;
        // In f32, the widest that it is ever held in.
        let size = dims.iter().try_fold(4usize, |n, dim| n.checked_mul(*dim));
        if size.is_none() {
            bail!("gguf: tensor `{name}` has shape {dims:?}, more than there can be");
        }
        // candle makes a slice of blocks at whatever address an empty buffer has.
        if size == Some(0) {
            bail!("gguf: tensor `{name}` has shape {dims:?}, which holds nothing");
        }
        match self.ct.tensor(self.reader, name, device) {
            Ok(tensor) => Ok(tensor),
            Err(e) => bail!("gguf: tensor `{name}`: {e}; the file may be cut short"),
        }
    }
}

impl<R: Seek + Read> Source for File<'_, R> {
    fn device(&self) -> &Device {
        self.device
    }

    fn has(&self, tensor: &str) -> bool {
        self.ct.tensor_infos.contains_key(tensor)
    }

    fn matrix(
        &mut self,
        tensor: &str,
        rows: usize,
        cols: usize,
        heads: Option<usize>,
    ) -> Result<LinearWeight> {
        if heads.is_some() {
            bail!("`{tensor}` is in blocks, expected dense rows");
        }
        if let Some(weight) = self.packed(tensor, rows, cols)? {
            return Ok(LinearWeight::Packed(Weight::Packed(weight)));
        }
        #[cfg(feature = "cuda")]
        if let Some(blocks) = self.on_gpu(tensor, rows, cols)? {
            return Ok(LinearWeight::Packed(Weight::Blocks(blocks)));
        }
        let weight = self.blocks(tensor, rows, cols)?;
        let stays = self.multiplies_blocks && quant::supports(weight.dtype());
        match self.dtype {
            DType::F32 => Ok(LinearWeight::Quantized(Arc::new(weight))),
            _ if stays => Ok(LinearWeight::Quantized(Arc::new(weight))),
            dtype => Ok(LinearWeight::Dense(numbers(&weight, dtype)?)),
        }
    }

    fn vector(&mut self, tensor: &str, len: usize) -> Result<Tensor> {
        let vector = self.on_cpu(tensor, len)?.to_dtype(self.dtype)?;
        vector.to_device(self.device)
    }

    fn table(
        &mut self,
        tensor: &str,
        (rows, cols): (usize, usize),
        tied: Option<&str>,
        fusion: Fusion,
    ) -> Result<(Embedding, Option<Projection>)> {
        if let Some(table) = self.packed(tensor, rows, cols)? {
            let head = tied.map(|_| Projection::from_packed(vec![table.clone()], fusion));
            return Ok((Embedding::from_packed(table, self.dtype)?, head));
        }
        #[cfg(feature = "cuda")]
        if let Some(blocks) = self.on_gpu(tensor, rows, cols)? {
            return of_blocks(blocks, self.dtype, tied.is_some(), fusion);
        }
        embedding_and_head(
            self.blocks(tensor, rows, cols)?,
            self.dtype,
            tied.is_some(),
            fusion,
        )
    }
}

/// What keys and values are stored in: of a file that is quantized in 16 bits, which the tensor cores of
/// a GPU take and a CPU reads in half the time. Candle's own operations on a CPU would widen all of them
/// in every step.
pub fn cache_dtype(blocks: bool, device: &Device, fusion: Fusion) -> DType {
    match blocks && (device.is_cuda() || fusion.on(device).flash_attention) {
        true => DType::F16,
        false => DType::F32,
    }
}

/// A table of rows for activations in `dtype`, and the head that shares it if it is `tied`.
pub fn embedding_and_head(
    table: QTensor,
    dtype: DType,
    tied: bool,
    fusion: Fusion,
) -> Result<(Embedding, Option<Projection>)> {
    #[cfg(feature = "cuda")]
    if fusion.quant_linear && quant::supports(table.dtype()) && table.device().is_cuda() {
        let blocks = Arc::new(BlockMatrix::from_qtensor(&table)?);
        return of_blocks(blocks, dtype, tied, fusion);
    }
    let dense = numbers(&table, dtype)?;
    let weight = match dtype {
        DType::F32 => LinearWeight::Quantized(Arc::new(table)),
        // Blocks that are multiplied as they are have come another way.
        _ => LinearWeight::Dense(dense.clone()),
    };
    let head = tied
        .then(|| Projection::new(vec![weight], None, fusion))
        .transpose()?;
    Ok((Embedding::from_table(dense), head))
}

/// The same of blocks on a GPU.
#[cfg(feature = "cuda")]
fn of_blocks(
    table: Arc<BlockMatrix>,
    dtype: DType,
    tied: bool,
    fusion: Fusion,
) -> Result<(Embedding, Option<Projection>)> {
    let weight = Weight::Blocks(table.clone());
    let head = tied.then(|| Projection::from_weights(vec![weight], fusion));
    Ok((Embedding::from_blocks(table, dtype)?, head))
}
