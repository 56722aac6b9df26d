//! How a layer's matrix is stored: asked here, and nowhere else.

use super::config::Format;
use super::gptq::Zeros;
use super::tensors::Tensors;
use super::unpacked::Unpacked;
use super::{awq, compressed, gptq};
use candle_core::{Result, bail};

/// How the matrix of a quantized layer is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    Gptq(Zeros),
    Awq,
    PackQuantized,
    IntQuantized,
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
            Some(Format::CompressedTensors) if tensors.has(compressed::PACKED) => {
                Some(Packing::PackQuantized)
            }
            Some(Format::CompressedTensors) if scaled => Some(Packing::IntQuantized),
            Some(_) => None,
            None if tensors.has(gptq::PACKED) => {
                let (_, dims) = tensors.matrix_of_words(gptq::PACKED)?;
                Some(match awq::is_packed(dims, size) {
                    true => Packing::Awq,
                    false => Packing::Gptq(Zeros::Unknown),
                })
            }
            None if tensors.has(compressed::PACKED) => Some(Packing::PackQuantized),
            None if scaled || tensors.has("weight_scale_inv") => bail!(
                "a scale stands beside it, and no configuration says in which format: \
                 `models::Checkpoint` opens the file with its config.json"
            ),
            None => None,
        })
    }

    /// Whether a layer has a matrix under another name than `weight`.
    pub fn is_renamed(tensors: &Tensors<'_>) -> bool {
        tensors.has(gptq::PACKED) || tensors.has(compressed::PACKED)
    }

    /// The matrix `[rows, cols]` of a layer.
    ///
    /// # Errors
    /// If a tensor is missing or has another shape.
    pub fn read(self, tensors: &Tensors<'_>, size: (usize, usize)) -> Result<Unpacked> {
        match self {
            Packing::Gptq(zeros) => gptq::read(tensors, size, zeros),
            Packing::Awq => awq::read(tensors, size),
            Packing::PackQuantized => compressed::read_packed(tensors, size),
            Packing::IntQuantized => compressed::read_bytes(tensors, size),
        }
    }
}
