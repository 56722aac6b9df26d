//! Tensors of a GGUF file by their path, under the names of `candle_transformers::quantized_var_builder`.

use super::gguf::File;
use super::weights::Source;
use crate::Fusion;
use crate::nn::{Embedding, LinearWeight, Projection};
use candle_core::quantized::QTensor;
use candle_core::quantized::gguf_file::Content;
use candle_core::{DType, Device, Error, Result, Shape, Tensor, bail};
use std::io::Cursor;
use std::path::Path;
use std::sync::Arc;

/// A GGUF file in memory, whose tensors are made when they are asked for. candle-transformers makes all of
/// them when the file is opened.
///
/// ```
/// use candle_core::Device;
/// use candle_fused::quantized_var_builder::VarBuilder;
/// # mod tiny { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/gguf.rs")); }
/// # let bytes = tiny::gguf("llama", false)?;
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("model.gguf");
/// # std::fs::write(&path, &bytes)?;
/// // A GGUF file of one layer, and its bytes.
/// for vb in [VarBuilder::from_gguf(&path, &Device::Cpu)?, VarBuilder::from_gguf_buffer(&bytes, &Device::Cpu)?] {
///     assert!(vb.contains_key("blk.0.attn_k.weight") && vb.device().is_cpu());
///     let keys = vb.pp("blk").pp(0).pp("attn_k");
///     assert_eq!(keys.get((32, 64), "weight")?.shape(), keys.get_no_shape("weight")?.shape());
///     assert!(keys.get((64, 32), "weight").is_err());
/// }
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone)]
pub struct VarBuilder {
    file: Arc<(Content, Vec<u8>)>,
    path: Vec<String>,
    device: Device,
}

impl VarBuilder {
    /// Reads the file at `p`.
    ///
    /// # Errors
    /// If it cannot be read, or is no GGUF file.
    pub fn from_gguf<P: AsRef<Path>>(p: P, device: &Device) -> Result<Self> {
        let bytes = std::fs::read(&p).map_err(|e| Error::from(e).with_path(p))?;
        Self::over(bytes, device)
    }

    /// A file whose bytes these are; they are copied.
    ///
    /// # Errors
    /// If they are no GGUF file.
    pub fn from_gguf_buffer(buffer: &[u8], device: &Device) -> Result<Self> {
        Self::over(buffer.to_vec(), device)
    }

    fn over(bytes: Vec<u8>, device: &Device) -> Result<Self> {
        let content = Content::read(&mut Cursor::new(&bytes))?;
        Ok(Self {
            file: Arc::new((content, bytes)),
            path: Vec::new(),
            device: device.clone(),
        })
    }

    /// The same file below `s`: names get `s.` in front.
    pub fn pp<S: ToString>(&self, s: S) -> Self {
        let mut below = self.clone();
        below.path.push(s.to_string());
        below
    }

    fn path(&self, name: &str) -> String {
        let parts = self.path.iter().map(String::as_str);
        parts.chain([name]).collect::<Vec<_>>().join(".")
    }

    /// The tensor of this name, if it has this shape.
    ///
    /// # Errors
    /// If there is no such tensor, it has another shape, or the file is cut short.
    pub fn get<S: Into<Shape>>(&self, s: S, name: &str) -> Result<Arc<QTensor>> {
        self.check(name, s.into().dims())?;
        self.get_no_shape(name)
    }

    /// The tensor of this name.
    ///
    /// # Errors
    /// If there is no such tensor, or the file is cut short.
    pub fn get_no_shape(&self, name: &str) -> Result<Arc<QTensor>> {
        let tensor = self.open(false, |file| file.any(&self.path(name), &self.device))?;
        Ok(Arc::new(tensor))
    }

    /// Where tensors are made.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Whether the file has a tensor of this whole name, wherever `self` stands.
    pub fn contains_key(&self, key: &str) -> bool {
        self.file.0.tensor_infos.contains_key(key)
    }

    fn check(&self, name: &str, expected: &[usize]) -> Result<()> {
        let path = self.path(name);
        match self.file.0.tensor_infos.get(&path) {
            Some(info) if info.shape.dims() == expected => Ok(()),
            Some(info) => bail!(
                "gguf: tensor `{path}` has shape {:?}, expected {expected:?}",
                info.shape.dims()
            ),
            None => bail!("gguf: tensor `{path}` is missing"),
        }
    }

    fn open<T>(
        &self,
        packs: bool,
        read: impl FnOnce(&mut File<'_, Cursor<&[u8]>>) -> Result<T>,
    ) -> Result<T> {
        let (content, bytes) = &*self.file;
        let mut reader = Cursor::new(bytes.as_slice());
        read(&mut File::new(content, &mut reader, &self.device, packs))
    }
}

/// The weights of a model.
pub(super) struct Tensors {
    vb: VarBuilder,
    /// Whether matrices are packed as they are read.
    packs: bool,
}

impl Tensors {
    pub(super) fn new(vb: VarBuilder, fusion: Fusion) -> Self {
        let packs = fusion.on(&vb.device).quant_linear;
        Self { vb, packs }
    }

    /// What keys and values are stored in.
    pub(super) fn cache_dtype(&self, fusion: Fusion) -> Result<DType> {
        self.vb
            .open(self.packs, |file| Ok(file.cache_dtype(fusion)))
    }
}

impl Source for Tensors {
    fn device(&self) -> &Device {
        &self.vb.device
    }

    fn has(&self, tensor: &str) -> bool {
        self.vb.contains_key(&self.vb.path(tensor))
    }

    fn matrix(
        &mut self,
        tensor: &str,
        rows: usize,
        cols: usize,
        heads: Option<usize>,
    ) -> Result<LinearWeight> {
        self.vb.check(tensor, &[rows, cols])?;
        let path = self.vb.path(tensor);
        self.vb
            .open(self.packs, |file| file.matrix(&path, rows, cols, heads))
    }

    fn vector(&mut self, tensor: &str, len: usize) -> Result<Tensor> {
        self.vb.check(tensor, &[len])?;
        let path = self.vb.path(tensor);
        self.vb.open(self.packs, |file| file.vector(&path, len))
    }

    fn table(
        &mut self,
        tensor: &str,
        (rows, cols): (usize, usize),
        tied: Option<&str>,
        fusion: Fusion,
    ) -> Result<(Embedding, Option<Projection>)> {
        self.vb.check(tensor, &[rows, cols])?;
        let path = self.vb.path(tensor);
        self.vb.open(self.packs, |file| {
            file.table(&path, (rows, cols), tied, fusion)
        })
    }
}
