//! How a layer's matrix is stored: asked here, and nowhere else.

use super::config::{Bytes, Format};
use super::gptq::Zeros;
use super::kept::Kept;
use super::tensors::Tensors;
use super::unpacked::{Target, Unpacked};
use super::words::InWords;
use super::{awq, bitnet, compressed, fp8, gptq, nf4, nvfp4};
use crate::models::weights::arranged;
use crate::nn::LinearWeight;
use candle_core::{DType, Device, Result, Tensor, bail};

/// How the matrix of a quantized layer is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    Gptq(Zeros),
    Awq,
    PackQuantized,
    IntQuantized,
    Fp8(fp8::Block),
    Nvfp4,
    BitNet(bitnet::Layer),
    Nf4,
}

/// What is read.
enum Matrix {
    Codes(Unpacked),
    Words(InWords),
    Floats(fp8::Floats),
    Kept(Kept),
    /// In f32, on the host.
    Numbers(Tensor),
}

impl Packing {
    /// How the matrix `[rows, cols]` of a layer is stored, by what the configuration says, or by its
    /// tensors alone; none if it is numbers.
    ///
    /// # Errors
    /// If the tensors do not say.
    pub fn of(
        format: Option<Format>,
        tensors: &Tensors<'_>,
        size: (usize, usize),
    ) -> Result<Option<Self>> {
        let scaled = tensors.has("weight") && tensors.has(compressed::SCALE);
        Ok(match format {
            Some(Format::Gptq { zeros_as_they_are }) if tensors.has(gptq::PACKED) => {
                Some(Packing::Gptq(match zeros_as_they_are {
                    true => Zeros::AsTheyAre,
                    false => Zeros::LessOne,
                }))
            }
            Some(Format::Awq) if tensors.has(awq::PACKED) => Some(Packing::Awq),
            Some(Format::CompressedTensors { nvfp4: true, .. })
                if tensors.has(compressed::PACKED) =>
            {
                Some(Packing::Nvfp4)
            }
            Some(Format::CompressedTensors { .. }) | None if nvfp4::is_there(tensors) => {
                Some(Packing::Nvfp4)
            }
            Some(Format::CompressedTensors { .. }) if tensors.has(compressed::PACKED) => {
                Some(Packing::PackQuantized)
            }
            Some(Format::CompressedTensors { bytes, .. }) if scaled => Some(match bytes {
                Bytes::Int => Packing::IntQuantized,
                Bytes::Fp8(block) => Packing::Fp8(block),
            }),
            Some(Format::Fp8(block)) if fp8::is_there(tensors) => Some(Packing::Fp8(block)),
            Some(Format::BitNet(layer)) if bitnet::is_there(tensors, layer) => {
                Some(Packing::BitNet(layer))
            }
            Some(Format::Nf4) | None if nf4::is_there(tensors) => Some(Packing::Nf4),
            Some(_) => None,
            None if tensors.has(gptq::PACKED) => {
                let (_, dims) = tensors.codes_in_words(gptq::PACKED)?;
                Some(match awq::is_packed(dims, size) {
                    true => Packing::Awq,
                    false => Packing::Gptq(Zeros::Unknown),
                })
            }
            None if tensors.has(compressed::PACKED) => Some(Packing::PackQuantized),
            None if fp8::is_there(tensors) => bail!(
                "a scale stands beside it, and no configuration says in which format: \
                 `models::Checkpoint` opens the file with its config.json"
            ),
            None => None,
        })
    }

    /// Whether a layer was trained with its input rounded to 8 bits of each token.
    pub fn rounds_input(format: Option<Format>, tensors: &Tensors<'_>) -> bool {
        matches!(format, Some(Format::BitNet(layer)) if bitnet::is_there(tensors, layer))
    }

    /// Whether a layer has a matrix under another name than `weight`.
    pub fn is_renamed(tensors: &Tensors<'_>) -> bool {
        tensors.has(gptq::PACKED) || tensors.has(compressed::PACKED)
    }

    /// The matrix `[rows, cols]` of a layer where it is wanted, with the rows of `heads` put apart as
    /// [`Source::matrix`](crate::models::weights::Source::matrix) has it.
    ///
    /// # Errors
    /// If a tensor is missing or has another shape, or no format here holds the numbers exactly.
    pub fn weight(
        self,
        tensors: &Tensors<'_>,
        size: (usize, usize),
        heads: Option<usize>,
        to: Target<'_>,
    ) -> Result<LinearWeight> {
        let words_on = match to.unpacks_words(heads) {
            true => to.device,
            false => &Device::Cpu,
        };
        match self.matrix(&tensors.with_words_on(words_on), size)? {
            Matrix::Codes(codes) => codes.into_weight(heads, to),
            Matrix::Words(words) => words.into_weight(heads, to),
            Matrix::Floats(floats) => floats.into_weight(heads, to),
            Matrix::Kept(codes) => codes.into_weight(heads, to),
            Matrix::Numbers(values) => {
                tracing::info!(
                    "`{}`: {self:?} weights that no kernel takes become {:?}",
                    tensors.stem(),
                    to.dtype
                );
                let values = arranged(values.to_dtype(to.dtype)?, heads)?;
                Ok(LinearWeight::Dense(values.to_device(to.device)?))
            }
        }
    }

    /// The numbers `[rows, cols]` of a layer's matrix, on the host.
    ///
    /// # Errors
    /// If a tensor is missing or has another shape.
    pub fn values(
        self,
        tensors: &Tensors<'_>,
        size: (usize, usize),
        dtype: DType,
    ) -> Result<Tensor> {
        match self.matrix(tensors, size)? {
            Matrix::Codes(codes) => codes.into_values(dtype),
            Matrix::Words(words) => words.unpacked()?.into_values(dtype),
            Matrix::Floats(floats) => floats.into_values()?.to_dtype(dtype),
            Matrix::Kept(codes) => codes.into_values()?.to_dtype(dtype),
            Matrix::Numbers(values) => values.to_dtype(dtype),
        }
    }

    fn matrix(self, tensors: &Tensors<'_>, size: (usize, usize)) -> Result<Matrix> {
        let codes = match self {
            Packing::Gptq(zeros) => return gptq::read(tensors, size, zeros).map(Matrix::Words),
            Packing::Awq => return awq::read(tensors, size).map(Matrix::Words),
            Packing::PackQuantized => {
                return compressed::read_packed(tensors, size).map(Matrix::Words);
            }
            Packing::IntQuantized => {
                return Ok(match compressed::read_bytes(tensors, size)? {
                    (rest, Some(words)) => Matrix::Words(InWords { rest, words }),
                    (codes, None) => Matrix::Codes(codes),
                });
            }
            Packing::BitNet(layer) => bitnet::read(tensors, size, layer),
            Packing::Fp8(block) => return fp8::read(tensors, size, block).map(Matrix::Floats),
            Packing::Nvfp4 => return nvfp4::read(tensors, size).map(Matrix::Kept),
            Packing::Nf4 => {
                let stored = nf4::read(tensors, size)?;
                return match stored.kept() {
                    Some(kept) => Ok(Matrix::Kept(kept)),
                    None => stored.into_values().map(Matrix::Numbers),
                };
            }
        };
        codes.map(Matrix::Codes)
    }

    /// The codes of a layer's matrix.
    #[cfg(test)]
    pub fn codes(self, tensors: &Tensors<'_>, size: (usize, usize)) -> Result<Unpacked> {
        match self.matrix(tensors, size)? {
            Matrix::Codes(codes) => Ok(codes),
            Matrix::Words(words) => words.unpacked(),
            Matrix::Floats(_) | Matrix::Kept(_) | Matrix::Numbers(_) => {
                bail!("numbers, expected codes")
            }
        }
    }
}
