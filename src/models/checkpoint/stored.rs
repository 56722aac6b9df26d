//! The tensors of a `VarBuilder` as a model takes them.

use super::config::Format;
use super::fp8;
use super::packing::Packing;
use super::tensors::{CONFIG, Tensors};
use super::unpacked::Target;
use crate::Fusion;
use crate::fusion::fallback;
use crate::models::weights::Source;
use crate::nn::pack::named;
use crate::nn::{Embedding, LinearWeight, Projection};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;

/// The tensors of a `VarBuilder`, quantized or not.
pub struct Stored<'a> {
    vb: VarBuilder<'a>,
    /// The same on the host, where matrices are unpacked.
    on_host: VarBuilder<'a>,
    /// What the configuration says, if there is one.
    format: Option<Format>,
    /// Whether the builder makes every tensor that it is asked for.
    has_all: bool,
    fusion: Fusion,
}

impl<'a> Stored<'a> {
    /// # Errors
    /// If the configuration that comes with the builder asks for what cannot be had.
    pub fn new(vb: VarBuilder<'a>, fusion: Fusion) -> Result<Self> {
        let on_host = vb.clone().set_device(Device::Cpu);
        // `VarBuilder::zeros` has every tensor that one can think of.
        let has_all = vb.contains_tensor("no tensor");
        let format = match !has_all && vb.contains_tensor(CONFIG) {
            true => {
                let config = on_host.get_unchecked_dtype(CONFIG, DType::U8)?.to_vec1()?;
                Format::of_config(&String::from_utf8_lossy(&config))?
            }
            false => None,
        };
        let becomes_dense = match format {
            Some(Format::Fp8(block)) => !fp8::is_kept(block),
            _ => false,
        };
        if let Some(format) = format.filter(|_| becomes_dense) {
            tracing::info!(
                "the checkpoint's {format:?} weights are dequantized to {:?}",
                vb.dtype()
            );
        }
        if let Some(Format::CompressedTensors {
            ignores_nvfp4_inputs: true,
            ..
        }) = format
        {
            tracing::info!(
                "the checkpoint's NVFP4 weights meet activations as they are, which are to be NVFP4 too"
            );
        }
        Ok(Self {
            vb,
            on_host,
            format,
            has_all,
            fusion,
        })
    }

    /// The tensors of a matrix, beside which others may say how it is quantized.
    fn beside<'t>(&'t self, tensor: &'t str) -> Option<Tensors<'t>> {
        let stem = tensor.strip_suffix(".weight").filter(|_| !self.has_all);
        stem.map(|stem| Tensors::new(&self.on_host, stem))
    }

    /// A layer's matrix, if it is quantized.
    fn quantized(
        &self,
        tensor: &str,
        size: (usize, usize),
        heads: Option<usize>,
    ) -> Result<Option<LinearWeight>> {
        let Some(tensors) = self.beside(tensor) else {
            return Ok(None);
        };
        let Some(packing) = Packing::of(self.format, &tensors, size)? else {
            return Ok(None);
        };
        let device = self.vb.device();
        let target = Target {
            device,
            dtype: self.vb.dtype(),
            fused: self.fusion.quant_linear && fallback(device).is_none(),
        };
        packing.weight(&tensors, size, heads, target).map(Some)
    }
}

impl Source for Stored<'_> {
    fn device(&self) -> &Device {
        self.vb.device()
    }

    fn dtype(&self) -> Option<DType> {
        Some(self.vb.dtype())
    }

    fn has(&self, tensor: &str) -> bool {
        let stem = tensor.strip_suffix(".weight");
        let renamed = |stem| Packing::is_renamed(&Tensors::new(&self.on_host, stem));
        self.vb.contains_tensor(tensor) || stem.is_some_and(renamed)
    }

    fn rounds_input(&self, tensor: &str) -> bool {
        let tensors = self.beside(tensor);
        tensors.is_some_and(|tensors| Packing::rounds_input(self.format, &tensors))
    }

    fn matrix(
        &mut self,
        tensor: &str,
        rows: usize,
        cols: usize,
        heads: Option<usize>,
    ) -> Result<LinearWeight> {
        match named(tensor, self.quantized(tensor, (rows, cols), heads))? {
            Some(weight) => Ok(weight),
            None => self.vb.matrix(tensor, rows, cols, heads),
        }
    }

    fn vector(&mut self, tensor: &str, len: usize) -> Result<Tensor> {
        self.vb.vector(tensor, len)
    }

    fn table(
        &mut self,
        tensor: &str,
        size: (usize, usize),
        tied: Option<&str>,
        fusion: Fusion,
    ) -> Result<(Embedding, Option<Projection>)> {
        self.vb.table(tensor, size, tied, fusion)
    }
}
