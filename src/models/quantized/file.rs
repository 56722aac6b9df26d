//! Quantized models in safetensors files, used where they are mapped.
//!
//! A file is an ordinary safetensors file. A quantized matrix `NAME` is a tensor `NAME` of dtype U8 and
//! one dimension, the bytes of [`crate::cpu::packed`]'s layout: groups of 16 rows, in each chunks along
//! a row, in each chunk the scales and then planes of codes of 64 bytes. It begins at a multiple of 64
//! bytes of the file. Everything else is stored as it was. `__metadata__` holds
//!
//! | key | value |
//! |---|---|
//! | `candle_fused.layout` | `2`, the version of this description |
//! | `candle_fused.NAME` | `SCHEME ROWSxCOLS`, as `int4-g64-z 1536x576`; followed by ` heads=N` if the rows of queries, keys and values stood together for each of N heads and now stand apart |
//!
//! A row group of `K` columns is
//!
//! | scheme | chunk | head of the chunk | then for each 32 columns |
//! |---|---|---|---|
//! | int8 | the row | 16 f32 scales | 8 planes: byte `4 row + t` of plane `i` is column 4i + t |
//! | fp8 | the row | 16 f32 scales, whose sign says that a NaN is among the codes | the same, of e4m3 floats |
//! | fp8-block128 | 128 columns | the same | the same |
//! | nvfp4 | 512 columns | 16 f32 scales; for each 16 columns 16 e4m3 scales | 4 planes: byte `4 row + t` of plane `i` is column 4i + t (low nibble) and 16 + 4i + t (high), of e2m1 floats |
//! | nf4 | 64 columns | 16 f32 scales | the same, of places in a table |
//! | int4-gG | 2 groups | for each group 16 f16 scales | 4 planes: byte `4 row + t` of plane `i` is column 4i + t (low nibble) and 16 + 4i + t (high) |
//! | int4-gG-z | 4 groups | for each group 16 f16 scales; for each 16 u8 zero points, in sixteenths | the same |
//! | ternary-tensor, ternary-row | the row | 16 f32 scales | 2 planes: bits 2i and 2i + 1 of byte `16 t + row` of plane `p` are column 16p + 4i + t, plus 1 |
//! | ternary-gG | 2 groups | for each group 16 f16 scales | the same |
//!
//! A last chunk that is not full has the whole head and the planes of the columns that there are. Rows
//! that the last row group lacks are zeros.

use crate::cpu::packed::{FileBytes, PackedMatrix};
#[cfg(feature = "cuda")]
use crate::cuda::upload_tensor;
use crate::nn::pack::{dense, named, packed_on_device};
use crate::ops::Weight;
use crate::quant::Scheme;
use candle_core::{DType, Device, Result, Shape, Tensor, bail};
use candle_nn::Init;
use candle_nn::var_builder::SimpleBackend;
use memmap2::MmapOptions;
use safetensors::{Dtype, SafeTensors};
use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// The key of the version.
pub(super) const LAYOUT: &str = "candle_fused.layout";

/// In front of the names of quantized matrices.
pub(super) const PREFIX: &str = "candle_fused.";

/// The version that is written and read.
pub(super) const VERSION: &str = "2";

/// A file with a quantized model, mapped into memory or copied there: on the CPU its matrices are used in place.
///
/// It is also a backend of a `VarBuilder` that turns the matrices into numbers, so that any candle model
/// can load it, as large as if it were dense.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_fused::models::save_quantized;
/// use candle_fused::quant::{QuantizedFile, Recipe, Scheme};
/// # use candle_fused::models::llama::Config;
/// # let config = Config {
/// #     hidden_size: 64, intermediate_size: 96, vocab_size: 32, num_hidden_layers: 1,
/// #     num_attention_heads: 4, num_key_value_heads: 2, ..Config::config_7b_v2(false)
/// # };
/// # let vb = candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu);
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("model.safetensors");
/// save_quantized(&config, vb, &Recipe::new("int8".parse()?), &path)?;
/// assert!(QuantizedFile::is_quantized(&std::fs::read(&path)?));
/// // SAFETY: the file does not change while it is open.
/// let file = unsafe { QuantizedFile::open(&path)? };
/// let (down, norm) = ("model.layers.0.mlp.down_proj.weight", "model.norm.weight");
/// assert!(file.is_matrix(down) && !file.is_matrix(norm) && file.contains(norm));
/// assert!(file.matrices().all(|(_, scheme)| scheme == Scheme::Int8));
/// assert_eq!(file.matrix(down, 64, 96)?.rows(), 64);
/// assert_eq!(file.tensor(norm, DType::F32, &Device::Cpu)?.dims(), [64]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub struct QuantizedFile {
    bytes: Arc<FileBytes>,
    tensors: HashMap<String, Entry>,
}

impl std::fmt::Debug for QuantizedFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "QuantizedFile({} tensors)", self.tensors.len())
    }
}

/// A tensor of the file.
struct Entry {
    range: Range<usize>,
    kind: Kind,
}

enum Kind {
    Dense(DType, Vec<usize>),
    Quantized(Matrix),
}

/// What the metadata says of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Matrix {
    pub scheme: Scheme,
    pub rows: usize,
    pub cols: usize,
    /// Heads whose queries, keys and values stood together.
    pub heads: Option<usize>,
}

impl Matrix {
    /// As in `int4-g64 1536x576 heads=9`.
    pub fn describe(&self) -> String {
        let heads = self.heads.map_or(String::new(), |h| format!(" heads={h}"));
        format!("{} {}x{}{heads}", self.scheme, self.rows, self.cols)
    }

    fn read(text: &str) -> Result<Self> {
        let mut words = text.split(' ');
        let mut parsed = || -> Option<Self> {
            let scheme = words.next()?.parse().ok()?;
            let (rows, cols) = words.next()?.split_once('x')?;
            let heads = match words.next() {
                Some(word) => Some(word.strip_prefix("heads=")?.parse().ok()?),
                None => None,
            };
            Some(Self {
                scheme,
                rows: rows.parse().ok()?,
                cols: cols.parse().ok()?,
                heads,
            })
            .filter(|_| words.next().is_none())
        };
        match parsed() {
            Some(matrix) => Ok(matrix),
            None => bail!("metadata: `{text}`, expected as in `int4-g64 1536x576`"),
        }
    }
}

impl QuantizedFile {
    /// Maps a file and checks its header.
    ///
    /// # Safety
    /// As for every mapped file, nobody may change or cut the file while the result or a matrix out of
    /// it lives.
    ///
    /// # Errors
    /// If the file cannot be read, is no safetensors file, or its metadata is not that of a quantized
    /// model in a layout that is known here, by the tensor's name.
    pub unsafe fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let file =
            std::fs::File::open(path).map_err(|e| candle_core::Error::from(e).with_path(path))?;
        // SAFETY: the caller's.
        let map = unsafe { MmapOptions::new().map(&file) }
            .map_err(|e| candle_core::Error::from(e).with_path(path))?;
        match Self::read(FileBytes::Mapped(map)) {
            Ok(file) => Ok(file),
            Err(e) => bail!("{}: {e}", path.display()),
        }
    }

    /// The file in memory instead, which is copied once: for programs without a file system, as in WebAssembly.
    ///
    /// ```
    /// let error = candle_fused::quant::QuantizedFile::from_bytes(b"no such file").unwrap_err();
    /// assert!(error.to_string().contains("header"));
    /// ```
    ///
    /// # Errors
    /// If there is not so much memory, or as [`QuantizedFile::open`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        Self::read(FileBytes::copy(bytes)?)
    }

    /// Whether the header of this file says that it holds a quantized model.
    pub fn is_quantized(header: &[u8]) -> bool {
        let key = LAYOUT.as_bytes();
        header.windows(key.len()).any(|window| window == key)
    }

    fn read(bytes: FileBytes) -> Result<Self> {
        let (length, header) = SafeTensors::read_metadata(&bytes)?;
        let start = length.saturating_add(8);
        let none = HashMap::new();
        let metadata = header.metadata().as_ref().unwrap_or(&none);
        match metadata.get(LAYOUT).map(String::as_str) {
            Some(VERSION) => {}
            Some(other) => {
                bail!("{LAYOUT} is `{other}`, expected {VERSION}: written by another version")
            }
            None => bail!("no quantized model: the metadata has no {LAYOUT}"),
        }
        let mut tensors = HashMap::new();
        for (name, info) in header.tensors() {
            let (first, end) = info.data_offsets;
            let range = start.saturating_add(first)..start.saturating_add(end);
            if range.start > range.end || range.end > bytes.len() {
                bail!("tensor `{name}` ends behind the file, which is cut short");
            }
            let kind = match metadata.get(&format!("{PREFIX}{name}")) {
                Some(text) => {
                    let bytes = (info.dtype, info.shape.as_slice());
                    Kind::Quantized(named(&name, quantized(text, bytes))?)
                }
                None => Kind::Dense(named(&name, dtype(info.dtype))?, info.shape.clone()),
            };
            tensors.insert(name, Entry { range, kind });
        }
        for key in metadata.keys().filter(|key| *key != LAYOUT) {
            if let Some(name) = key.strip_prefix(PREFIX)
                && !tensors.contains_key(name)
            {
                bail!("tensor `{name}` is missing, though the metadata names it");
            }
        }
        Ok(Self {
            bytes: Arc::new(bytes),
            tensors,
        })
    }

    /// Whether there is a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Whether there is a quantized matrix of this name.
    pub fn is_matrix(&self, name: &str) -> bool {
        let entry = self.tensors.get(name);
        entry.is_some_and(|entry| matches!(entry.kind, Kind::Quantized(_)))
    }

    /// Names and schemes of the quantized matrices, in no order.
    pub fn matrices(&self) -> impl Iterator<Item = (&str, Scheme)> {
        self.tensors
            .iter()
            .filter_map(|(name, entry)| match entry.kind {
                Kind::Quantized(matrix) => Some((name.as_str(), matrix.scheme)),
                Kind::Dense(..) => None,
            })
    }

    /// A quantized matrix `[rows, cols]`, in place.
    ///
    /// # Errors
    /// If there is none of this name or it has another size.
    pub fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<PackedMatrix> {
        let (entry, matrix) = self.quantized(name)?;
        if (matrix.rows, matrix.cols) != (rows, cols) {
            bail!(
                "tensor `{name}` is {}x{}, expected {rows}x{cols}",
                matrix.rows,
                matrix.cols
            );
        }
        let range = entry.range.clone();
        let packed = PackedMatrix::mapped(matrix.scheme, (rows, cols), self.bytes.clone(), range);
        named(name, packed)
    }

    /// The same of whatever size it is.
    pub(crate) fn whole_matrix(&self, name: &str) -> Result<PackedMatrix> {
        let (_, matrix) = self.quantized(name)?;
        self.matrix(name, matrix.rows, matrix.cols)
    }

    /// The matrix as the fused product takes it: on the CPU in place, on a GPU repacked.
    pub(crate) fn weight(
        &self,
        name: &str,
        rows: usize,
        cols: usize,
        device: &Device,
    ) -> Result<Weight> {
        let packed = self.matrix(name, rows, cols)?;
        if device.is_cpu() {
            return Ok(Weight::Packed(Arc::new(packed)));
        }
        named(name, packed_on_device(&packed, device))
    }

    /// A tensor that is not quantized, in `dtype` on `device`.
    ///
    /// # Errors
    /// If there is none of this name or it is quantized.
    pub fn tensor(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        match self.tensors.get(name) {
            Some(Entry {
                range,
                kind: Kind::Dense(stored, shape),
            }) => {
                let bytes = &self.bytes[range.clone()];
                #[cfg(feature = "cuda")]
                if let Device::Cuda(cuda) = device
                    && *stored == dtype
                {
                    return named(name, upload_tensor(bytes, dtype, shape, cuda));
                }
                Tensor::from_raw_buffer(bytes, *stored, shape, &Device::Cpu)?
                    .to_dtype(dtype)?
                    .to_device(device)
            }
            Some(_) => bail!("tensor `{name}` is quantized, expected numbers"),
            None => bail!("tensor `{name}` is missing"),
        }
    }

    /// The heads for which a matrix's rows have been sorted.
    pub(crate) fn heads(&self, name: &str) -> Result<Option<usize>> {
        Ok(self.quantized(name)?.1.heads)
    }

    fn quantized(&self, name: &str) -> Result<(&Entry, Matrix)> {
        match self.tensors.get(name) {
            Some(entry) => match entry.kind {
                Kind::Quantized(matrix) => Ok((entry, matrix)),
                Kind::Dense(..) => bail!("tensor `{name}` is not quantized"),
            },
            None => bail!("tensor `{name}` is missing"),
        }
    }

    /// The numbers of a quantized matrix, its rows in the order of the checkpoint that it was made of.
    fn values(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        let (_, matrix) = self.quantized(name)?;
        let packed = Arc::new(self.matrix(name, matrix.rows, matrix.cols)?);
        let values = dense(&Weight::Packed(packed))?;
        let values = match matrix.heads {
            Some(heads) => {
                let size = matrix.rows / 3 / heads;
                values
                    .reshape((3, heads, size * matrix.cols))?
                    .transpose(0, 1)?
                    .contiguous()?
                    .reshape((matrix.rows, matrix.cols))?
            }
            None => values,
        };
        values.to_dtype(dtype)?.to_device(device)
    }
}

/// What a file's tensor says of a quantized matrix, checked against the bytes.
fn quantized(text: &str, (dtype, shape): (Dtype, &[usize])) -> Result<Matrix> {
    let matrix = Matrix::read(text)?;
    let Matrix { rows, cols, .. } = matrix;
    let expected = crate::cpu::packed::packed_bytes(matrix.scheme, rows, cols)?;
    if dtype != Dtype::U8 || shape != [expected] {
        bail!("{dtype:?} {shape:?}, but `{text}` takes U8 [{expected}]");
    }
    if let Some(heads) = matrix.heads
        && (heads == 0 || !rows.is_multiple_of(3) || !(rows / 3).is_multiple_of(heads))
    {
        bail!("metadata: {rows} rows are not queries, keys and values of {heads} heads");
    }
    Ok(matrix)
}

fn dtype(dtype: Dtype) -> Result<DType> {
    match dtype {
        Dtype::F32 => Ok(DType::F32),
        Dtype::F16 => Ok(DType::F16),
        Dtype::BF16 => Ok(DType::BF16),
        other => bail!("{other:?}, expected F32, F16 or BF16, or metadata of a quantized matrix"),
    }
}

impl SimpleBackend for QuantizedFile {
    fn get(&self, s: Shape, name: &str, _: Init, dtype: DType, dev: &Device) -> Result<Tensor> {
        let tensor = self.get_unchecked(name, dtype, dev)?;
        if tensor.shape() != &s {
            bail!(
                "tensor `{name}` has shape {:?}, expected {s:?}",
                tensor.shape()
            );
        }
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, dev: &Device) -> Result<Tensor> {
        match self.is_matrix(name) {
            true => self.values(name, dtype, dev),
            false => self.tensor(name, dtype, dev),
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.contains(name)
    }
}
