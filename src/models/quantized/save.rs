//! Writing quantized models; `file.rs` has the format.

use super::file::{LAYOUT, Matrix, PREFIX, VERSION};
use crate::cpu::packed::PackedMatrix;
use crate::quant::Format;
use candle_core::{DType, Result, Tensor, bail};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::Arc;

/// What the header is padded to, so that the first tensor begins at a cache line.
const LINE: usize = 64;

/// A tensor to be saved.
#[derive(Clone, Debug)]
pub(crate) enum Saved {
    /// As it is: f32, f16 or bf16.
    Dense(Tensor),
    /// Quantized; the heads whose rows have been sorted.
    Packed(Arc<PackedMatrix>, Option<usize>),
    /// Bytes of this dtype and shape.
    Raw(Dtype, Vec<usize>, Vec<u8>),
}

/// What a file says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Label {
    /// That of [`QuantizedFile`](super::QuantizedFile).
    Quantized,
    /// That of files of PyTorch's tensors, which transformers asks for.
    Torch,
}

impl Saved {
    fn bytes(&self) -> usize {
        match self {
            Saved::Dense(t) => t.elem_count() * t.dtype().size_in_bytes(),
            Saved::Packed(matrix, _) => matrix.bytes().len(),
            Saved::Raw(_, _, bytes) => bytes.len(),
        }
    }

    /// Quantized matrices first, whose sizes are whole lines, then the largest numbers, so that
    /// everything is aligned.
    fn rank(&self) -> usize {
        match self {
            Saved::Packed(..) => 0,
            Saved::Raw(Dtype::I64, ..) => 1,
            Saved::Dense(t) if t.dtype() == DType::F32 => 2,
            Saved::Raw(Dtype::I32 | Dtype::F32, ..) => 2,
            Saved::Dense(_) | Saved::Raw(..) => 3,
        }
    }
}

/// Writes tensors to a new file at `path`, which appears there only when it is complete.
///
/// # Errors
/// If a tensor is of a kind that the format does not have, or the file cannot be written.
pub(crate) fn save(path: &Path, mut tensors: Vec<(String, Saved)>, label: Label) -> Result<()> {
    tensors.sort_by(|a, b| (a.1.rank(), &a.0).cmp(&(b.1.rank(), &b.0)));
    let header = header(&tensors, label)?;
    let part = path.with_extension("safetensors.part");
    let written = write(&part, &header, &tensors)
        .and_then(|()| std::fs::rename(&part, path).map_err(Into::into));
    if let Err(e) = written {
        // What is there is of no use; the first error is the one to tell.
        let _ = std::fs::remove_file(&part);
        bail!("{}: {e}", path.display());
    }
    Ok(())
}

fn write(path: &Path, header: &[u8], tensors: &[(String, Saved)]) -> Result<()> {
    let mut file = BufWriter::new(File::create(path)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header)?;
    for (_, tensor) in tensors {
        match tensor {
            Saved::Packed(matrix, _) => file.write_all(matrix.bytes())?,
            Saved::Raw(_, _, bytes) => file.write_all(bytes)?,
            Saved::Dense(tensor) => tensor.write_bytes(&mut file)?,
        }
    }
    file.flush()?;
    Ok(())
}

/// The header with the padding behind it.
fn header(tensors: &[(String, Saved)], label: Label) -> Result<Vec<u8>> {
    let (key, value) = match label {
        Label::Quantized => (LAYOUT, VERSION),
        Label::Torch => ("format", "pt"),
    };
    let mut metadata = HashMap::from([(key.to_owned(), value.to_owned())]);
    let mut infos = Vec::new();
    let mut at = 0;
    for (name, tensor) in tensors {
        let end = at + tensor.bytes();
        let (dtype, shape) = match tensor {
            Saved::Dense(t) => (dense_dtype(name, t)?, t.dims().to_vec()),
            Saved::Raw(dtype, shape, _) => (*dtype, shape.clone()),
            Saved::Packed(matrix, heads) => {
                let Format::Scheme(scheme) = matrix.format() else {
                    bail!(
                        "tensor `{name}` is {}, expected a scheme: GGUF types are saved in GGUF files",
                        matrix.format()
                    );
                };
                let described = Matrix {
                    scheme,
                    rows: matrix.rows(),
                    cols: matrix.cols(),
                    heads: *heads,
                };
                metadata.insert(format!("{PREFIX}{name}"), described.describe());
                (Dtype::U8, vec![tensor.bytes()])
            }
        };
        infos.push((
            name.clone(),
            TensorInfo {
                dtype,
                shape,
                data_offsets: (at, end),
            },
        ));
        at = end;
    }
    let metadata = match Metadata::new(Some(metadata), infos) {
        Ok(metadata) => metadata,
        Err(e) => bail!("the header cannot be written: {e}"),
    };
    let mut header = match serde_json::to_vec(&metadata) {
        Ok(header) => header,
        Err(e) => bail!("the header cannot be written: {e}"),
    };
    let padded = (8 + header.len()).next_multiple_of(LINE) - 8;
    header.resize(padded, b' ');
    Ok(header)
}

fn dense_dtype(name: &str, tensor: &Tensor) -> Result<Dtype> {
    match tensor.dtype() {
        DType::F32 => Ok(Dtype::F32),
        DType::F16 => Ok(Dtype::F16),
        DType::BF16 => Ok(Dtype::BF16),
        other => bail!("tensor `{name}` is {other:?}, expected f32, f16 or bf16"),
    }
}
