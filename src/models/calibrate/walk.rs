//! A model's layers, quantized one after the other.

use super::held::Held;
use super::resume::Folder;
use super::steps::{Part, Step};
use super::{Calibration, CalibrationProgress};
use crate::Fusion;
use crate::cpu::packed::PackedMatrix;
use crate::models::balance::Balanced;
use crate::models::decoder::{Block, DecoderCache, Rotaries};
use crate::models::names::Names;
use crate::models::shape::Shape;
use crate::models::weights::{Loader, Source};
use crate::nn::gptq::{self, Hessian, InverseFactor};
use crate::nn::pack::{dense, named, rounded};
use crate::nn::recipe::{Finished, Quantization, Recipe};
use crate::ops::{RopeStyle, Weight};
use crate::quant::{Format, Scheme};
use candle_core::{DType, Device, Result, Tensor, bail};
use std::sync::Arc;

/// Tokens that go through a layer at a time.
const TOGETHER: usize = 2048;

/// A text as it goes through the layers.
pub struct Walk<'a, S> {
    loader: Loader<'a, Held<'a, S>>,
    recipe: &'a Recipe,
    calibration: &'a Calibration,
    rotaries: DecoderCache,
    parts: Vec<Part>,
    finished: Finished,
    folder: Option<Folder>,
}

impl<'a, S: Source> Walk<'a, S> {
    /// In front of the first layer.
    pub fn new(
        source: S,
        names: &'a Names,
        shape: &'a Shape,
        recipe: &'a Recipe,
        calibration: &'a Calibration,
    ) -> Result<Self> {
        let source = Balanced::new(source, recipe.is_balanced().then(|| shape.clone()));
        let mut loader = Loader {
            source: Held::new(source, recipe),
            names,
            shape,
            fusion: Fusion::all(),
        };
        loader.check()?;
        let (embedding, _) = loader.table(false)?;
        let window = calibration.window;
        let windows = (TOGETHER / window).max(1);
        let embed = |ids: &[u32]| -> Result<Part> {
            let ids = Tensor::from_slice(ids, (ids.len() / window, window), &Device::Cpu)?;
            Ok(Part {
                x: embedding.forward(&ids)?,
                between: None,
            })
        };
        let parts = calibration.ids.chunks(windows * window).map(embed);
        let parts = parts.collect::<Result<Vec<_>>>()?;
        let folder = match &calibration.folder {
            Some(path) => Some(Folder::open(path, recipe, calibration, &parts)?),
            None => None,
        };
        let rotaries = Rotaries::new(shape, RopeStyle::HalfSplit, &Device::Cpu)?;
        let rotaries = DecoderCache::new(shape.layers, rotaries, false, DType::F32, &Device::Cpu);
        Ok(Self {
            loader,
            recipe,
            calibration,
            rotaries,
            parts,
            finished: Finished::new(),
            folder,
        })
    }

    /// The matrices that are done.
    pub fn finished(self) -> Finished {
        self.finished
    }

    /// Quantizes a layer's matrices and takes the text through it.
    pub fn layer(&mut self, layer: usize) -> Result<()> {
        let mut block = self.loader.block(layer)?;
        let before = self.folder.as_ref().map(|folder| folder.layer(layer));
        let before = before.transpose()?.flatten();
        let mut done = before.unwrap_or_default();
        for step in Step::ALL {
            let matrices = step.matrices(self.loader.names, layer);
            let open = |name: &String| !done.contains_key(name) && self.scheme(name).is_some();
            let inverse = match matrices.iter().any(open) {
                true => Some(self.collect(layer, step, &block, &matrices)?),
                false => {
                    self.pass(layer, step, &block, None)?;
                    None
                }
            };
            for name in &matrices {
                self.report(layer, name, (0, 1));
                if let Some(packed) = self.quantize(name, inverse.as_ref(), &done)? {
                    done.insert(name.clone(), packed);
                }
                self.report(layer, name, (1, 1));
            }
            if !matrices.is_empty() {
                block = self.loader.block(layer)?;
            }
        }
        if let Some(folder) = &self.folder {
            folder.write(layer, &done)?;
        }
        self.finished.extend(done);
        self.loader.source.clear();
        Ok(())
    }

    /// The scheme of a matrix that is quantized by its inputs.
    fn scheme(&self, name: &str) -> Option<Scheme> {
        self.recipe.of(name).and_then(calibrated)
    }

    /// The inputs of a step's matrices.
    fn collect(
        &mut self,
        layer: usize,
        step: Step,
        block: &Block,
        matrices: &[String],
    ) -> Result<InverseFactor> {
        let first = matrices.first().map(String::as_str).unwrap_or_default();
        let Some(matrix) = self.loader.source.get(first) else {
            bail!("tensor `{first}` has not been read");
        };
        let mut hessian = named(first, Hessian::new(matrix.dim(1)?))?;
        named(first, self.pass(layer, step, block, Some(&mut hessian)))?;
        named(first, hessian.inverse(&self.calibration.options))
    }

    /// Takes the text a step further.
    fn pass(
        &mut self,
        layer: usize,
        step: Step,
        block: &Block,
        mut hessian: Option<&mut Hessian>,
    ) -> Result<()> {
        let doing = match step.matrices(self.loader.names, layer).first() {
            Some(name) => name.clone(),
            None => format!("{}.{layer}", self.loader.names.layer),
        };
        let total = self.parts.len();
        for done in 0..total {
            self.report(layer, &doing, (done, total));
            let rotaries = self.rotaries.rotaries(self.calibration.window)?;
            let rotary = rotaries.of(block);
            self.parts[done].step(step, block, rotary, hessian.as_deref_mut())?;
        }
        self.report(layer, &doing, (total, total));
        Ok(())
    }

    /// Quantizes a matrix, and leaves in its place what its codes are worth.
    fn quantize(
        &mut self,
        name: &str,
        inverse: Option<&InverseFactor>,
        done: &Finished,
    ) -> Result<Option<Arc<PackedMatrix>>> {
        let source = &mut self.loader.source;
        let (Some(asked), Some(matrix)) = (self.recipe.of(name), source.get(name)) else {
            return Ok(None);
        };
        let (rows, cols) = matrix.dims2()?;
        let packed = match (done.get(name), inverse, calibrated(asked)) {
            (Some(packed), _, scheme) => {
                if (packed.rows(), packed.cols()) != (rows, cols)
                    || scheme.map(Format::Scheme) != Some(packed.format())
                {
                    bail!(
                        "tensor `{name}`: calibrated as {packed:?}, expected {asked}, {rows} x {cols}"
                    );
                }
                Arc::clone(packed)
            }
            (None, Some(inverse), Some(scheme)) => {
                let values = matrix.flatten_all()?.to_vec1()?;
                let codes = named(name, gptq::quantize(&values, rows, cols, scheme, inverse))?;
                Arc::new(PackedMatrix::from_codes(&codes)?)
            }
            _ => {
                let nearest = named(name, rounded(matrix, asked))?;
                source.replace(name, nearest);
                return Ok(None);
            }
        };
        source.replace(name, dense(&Weight::Packed(packed.clone()))?);
        Ok(Some(packed))
    }

    fn report(&self, layer: usize, doing: &str, (done, total): (usize, usize)) {
        self.calibration.report(CalibrationProgress {
            layer,
            layers: self.loader.shape.layers,
            doing,
            done,
            total,
        });
    }
}

/// The scheme of a quantization by inputs.
fn calibrated(asked: Quantization) -> Option<Scheme> {
    let scheme = asked.scheme();
    scheme.filter(|scheme| matches!(scheme, Scheme::Int4 { .. } | Scheme::Int8))
}
