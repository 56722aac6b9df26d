//! The tensors of one layer of a checkpoint, on the host but for the codes that a GPU unpacks.

use crate::pool;
use crate::quant::widened;
use crate::quant::words::WordLayout;
use candle_core::{CpuStorage, DType, Device, Result, Storage, Tensor, bail};
use candle_nn::VarBuilder;

/// Rows that a task unpacks at least.
const GRAIN: usize = 128;

/// Columns whose words stay in the cache while rows are unpacked.
const TILE: usize = 64;

/// The name under which a `Checkpoint` hands on its `config.json`. No tensor has it, and none that ends in it.
pub const CONFIG: &str = "config.json";

/// Asked for this dtype, a `Checkpoint` gives a tensor in the one that it is stored in. A `VarBuilder` has no other way
/// to tell, and nothing is lost: candle converts nothing to 4-bit floats.
pub const AS_STORED: DType = DType::F4;

/// Where tensors are read from.
pub trait Read {
    fn contains(&self, name: &str) -> bool;

    /// A tensor as it is stored; in `dtype` if the source does not tell what that is.
    fn read_on(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor>;
}

impl Read for VarBuilder<'_> {
    fn contains(&self, name: &str) -> bool {
        self.contains_tensor(name)
    }

    fn read_on(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        let there = self.clone().set_device(device.clone());
        if self.contains_tensor(CONFIG)
            && let Ok(stored) = there.get_unchecked_dtype(name, AS_STORED)
        {
            return Ok(stored);
        }
        // A file without a configuration, or a backend around a `Checkpoint` that converts by itself.
        there.get_unchecked_dtype(name, dtype)
    }
}

/// What a tensor holds.
#[derive(Clone, Copy)]
struct Kind {
    /// What it is read as.
    dtype: DType,
    /// What it may be stored as: the same values, or the same bits.
    stored: &'static [DType],
    /// The same for people.
    expected: &'static str,
}

/// Words of codes, and indices.
const WORDS: Kind = Kind {
    dtype: DType::I32,
    stored: &[DType::I32, DType::U32, DType::I64],
    expected: "i32",
};

/// Bytes, of which candle has unsigned ones alone.
const BYTES: Kind = Kind {
    dtype: DType::U8,
    stored: &[DType::U8],
    expected: "u8 or i8",
};

const WORDS_OR_BYTES: Kind = Kind {
    dtype: DType::I32,
    stored: &[DType::I32, DType::U32, DType::I64, DType::U8],
    expected: "i32, or i8",
};

const FLOATS8: Kind = Kind {
    dtype: DType::F8E4M3,
    stored: &[DType::F8E4M3],
    expected: "f8e4m3",
};

const NUMBERS: Kind = Kind {
    dtype: DType::F32,
    stored: &[DType::F32, DType::F16, DType::BF16, DType::F64],
    expected: "f32, f16 or bf16",
};

const NUMBERS_OR_BYTES: Kind = Kind {
    dtype: DType::F32,
    stored: &[DType::F32, DType::F16, DType::BF16, DType::F64, DType::U8],
    expected: "u8, f32, f16 or bf16",
};

/// What a stored dtype is called: signed bytes come as unsigned ones.
pub fn stored_dtype(dtype: DType) -> &'static str {
    match dtype {
        DType::U8 => "u8 or i8",
        other => other.as_str(),
    }
}

/// Whole numbers as they are stored.
pub enum StoredInts {
    Words(Vec<u32>),
    /// Signed ones by their bits.
    Bytes(Vec<u8>),
}

/// Values as they are stored.
pub enum Stored {
    Numbers(Vec<f32>),
    Bytes(Vec<u8>),
}

impl Stored {
    pub fn into_numbers(self) -> Vec<f32> {
        match self {
            Stored::Numbers(values) => values,
            Stored::Bytes(bytes) => pool::map(&bytes, |byte| f32::from(*byte)),
        }
    }
}

/// The tensors whose names begin with a layer's.
pub struct Tensors<'a> {
    source: &'a dyn Read,
    stem: &'a str,
    /// Where words of codes are read to. All else is read to the host.
    words_on: &'a Device,
}

impl<'a> Tensors<'a> {
    pub fn new(source: &'a dyn Read, stem: &'a str) -> Self {
        Self {
            source,
            stem,
            words_on: &Device::Cpu,
        }
    }

    /// The same, whose words of codes go to a device as they are: of a mapped file without a copy on the host.
    pub fn with_words_on<'b>(&self, device: &'b Device) -> Tensors<'b>
    where
        'a: 'b,
    {
        Tensors {
            words_on: device,
            ..*self
        }
    }

    pub fn has(&self, part: &str) -> bool {
        self.source.contains(&self.name(part))
    }

    /// Whether the layer is an embedding or a head, by its name.
    pub fn is_end(&self) -> bool {
        ["embed", "wte", "head"]
            .iter()
            .any(|part| self.stem.contains(part))
    }

    /// The layer's name.
    pub fn stem(&self) -> &str {
        self.stem
    }

    fn name(&self, part: &str) -> String {
        format!("{}.{part}", self.stem)
    }

    /// A tensor as it is stored, which is one of what its kind may be.
    fn stored(&self, part: &str, kind: Kind, device: &Device) -> Result<Tensor> {
        let name = self.name(part);
        let tensor = self.source.read_on(&name, kind.dtype, device)?;
        if !kind.stored.contains(&tensor.dtype()) {
            bail!(
                "tensor `{name}` is {}, expected {}",
                stored_dtype(tensor.dtype()),
                kind.expected
            );
        }
        Ok(tensor)
    }

    fn read(&self, part: &str, kind: Kind) -> Result<Tensor> {
        self.stored(part, kind, &Device::Cpu)?.to_dtype(kind.dtype)
    }

    /// That a tensor has the shape that is expected.
    pub fn check(&self, part: &str, dims: &[usize], expected: &[usize]) -> Result<()> {
        if dims != expected {
            bail!(
                "tensor `{}` has shape {dims:?}, expected {expected:?}",
                self.name(part)
            );
        }
        Ok(())
    }

    /// Words of codes, one behind the other, and their size `[rows, cols]`.
    pub fn codes_in_words(&self, part: &str) -> Result<(Tensor, [usize; 2])> {
        let name = self.name(part);
        let tensor = self.stored(part, WORDS, self.words_on)?;
        // GPUs have no conversion for it.
        let tensor = match tensor.dtype() == WORDS.dtype {
            true => tensor,
            false => tensor
                .to_device(&Device::Cpu)?
                .to_dtype(WORDS.dtype)?
                .to_device(self.words_on)?,
        };
        let [rows, cols] = match *tensor.dims() {
            [rows, cols] => [rows, cols],
            ref dims => bail!("tensor `{name}` has shape {dims:?}, expected two dimensions"),
        };
        Ok((tensor.flatten_all()?, [rows, cols]))
    }

    /// Words of 32 bits of this shape.
    pub fn words(&self, part: &str, dims: &[usize]) -> Result<Vec<u32>> {
        let words = self.integers(part, dims)?;
        Ok(words.into_iter().map(|w| w as u32).collect())
    }

    /// Whole numbers of this shape.
    pub fn integers(&self, part: &str, dims: &[usize]) -> Result<Vec<i32>> {
        let tensor = self.read(part, WORDS)?;
        self.check(part, tensor.dims(), dims)?;
        tensor.flatten_all()?.to_vec1()
    }

    /// Bytes of this shape; signed ones by their bits.
    pub fn bytes(&self, part: &str, dims: &[usize]) -> Result<Vec<u8>> {
        let (bytes, stored) = self.all_bytes(part)?;
        self.check(part, &stored, dims)?;
        Ok(bytes)
    }

    /// Bytes, and their shape.
    pub fn all_bytes(&self, part: &str) -> Result<(Vec<u8>, Vec<usize>)> {
        let tensor = self.read(part, BYTES)?;
        let dims = tensor.dims().to_vec();
        Ok((tensor.flatten_all()?.to_vec1()?, dims))
    }

    /// Words or bytes, whichever is stored, and their shape. A source that does not tell has words.
    pub fn words_or_bytes(&self, part: &str) -> Result<(StoredInts, Vec<usize>)> {
        let tensor = self.stored(part, WORDS_OR_BYTES, &Device::Cpu)?;
        let (dtype, dims) = (tensor.dtype(), tensor.dims().to_vec());
        let tensor = tensor.flatten_all()?;
        if dtype == BYTES.dtype {
            return Ok((StoredInts::Bytes(tensor.to_vec1()?), dims));
        }
        let words: Vec<i32> = tensor.to_dtype(WORDS.dtype)?.to_vec1()?;
        let words = words.into_iter().map(|w| w as u32).collect();
        Ok((StoredInts::Words(words), dims))
    }

    /// Codes in bytes, of this shape, one behind the other where words of codes go.
    pub fn codes_in_bytes(&self, part: &str, dims: &[usize]) -> Result<Tensor> {
        self.in_bytes(part, BYTES, dims)
    }

    /// e4m3 floats likewise.
    pub fn codes_in_floats8(&self, part: &str, dims: &[usize]) -> Result<Tensor> {
        self.in_bytes(part, FLOATS8, dims)
    }

    fn in_bytes(&self, part: &str, kind: Kind, dims: &[usize]) -> Result<Tensor> {
        let tensor = self.stored(part, kind, self.words_on)?;
        self.check(part, tensor.dims(), dims)?;
        tensor.flatten_all()
    }

    /// e4m3 floats of this shape, by their bits.
    pub fn floats8(&self, part: &str, dims: &[usize]) -> Result<Vec<u8>> {
        let tensor = self.read(part, FLOATS8)?;
        self.check(part, tensor.dims(), dims)?;
        bits(&tensor, |bits| bits)
    }

    /// Numbers, and their shape.
    pub fn numbers(&self, part: &str) -> Result<(Vec<f32>, Vec<usize>)> {
        let tensor = self.stored(part, NUMBERS, &Device::Cpu)?;
        let dims = tensor.dims().to_vec();
        let values = widened(&tensor, <[f32]>::to_vec)?;
        Ok((values, dims))
    }

    /// Numbers, or bytes, whichever is stored, and their shape.
    pub fn numbers_or_bytes(&self, part: &str) -> Result<(Stored, Vec<usize>)> {
        let tensor = self.stored(part, NUMBERS_OR_BYTES, &Device::Cpu)?;
        let dims = tensor.dims().to_vec();
        let tensor = tensor.flatten_all()?;
        Ok(match tensor.dtype() == BYTES.dtype {
            true => (Stored::Bytes(tensor.to_vec1()?), dims),
            false => (Stored::Numbers(widened(&tensor, <[f32]>::to_vec)?), dims),
        })
    }

    /// Numbers `[groups, rows]` as `[rows, groups]`, for any count of groups that `cols` divides by.
    pub fn scales_by_group(&self, part: &str, (rows, cols): (usize, usize)) -> Result<Vec<f32>> {
        let (scales, dims) = self.numbers(part)?;
        match *dims {
            [groups, n] if n == rows && groups > 0 && cols.is_multiple_of(groups) => {
                Ok(transposed(&scales, groups, rows))
            }
            _ => bail!(
                "tensor `{}` has shape {dims:?}, expected [groups, {rows}] with groups that divide \
                 the {cols} columns",
                self.name(part)
            ),
        }
    }
}

/// What `change` makes of the bits of e4m3 floats.
///
/// # Errors
/// If the tensor has another dtype.
pub fn bits<T: Send + Clone + Default>(
    floats: &Tensor,
    change: impl Fn(u8) -> T + Sync,
) -> Result<Vec<T>> {
    let floats = floats.to_device(&Device::Cpu)?.flatten_all()?;
    let (storage, layout) = floats.storage_and_layout();
    match (&*storage, layout.contiguous_offsets()) {
        (Storage::Cpu(CpuStorage::F8E4M3(floats)), Some((start, end))) => {
            Ok(pool::map(&floats[start..end], |float| {
                change(float.to_bits())
            }))
        }
        _ => bail!("{:?} floats, expected f8e4m3", floats.dtype()),
    }
}

/// `[rows, cols]` as `[cols, rows]`.
pub fn transposed<T: Copy + Send + Sync + Default>(
    values: &[T],
    rows: usize,
    cols: usize,
) -> Vec<T> {
    let mut out = vec![T::default(); rows * cols];
    pool::for_rows(&mut out, rows, GRAIN, |first, part| {
        let count = part.len() / rows;
        // Rows in whose cache lines the next columns are, too.
        for tile in (0..rows).step_by(TILE) {
            for col in 0..count {
                let out = &mut part[col * rows..][tile..rows.min(tile + TILE)];
                for (row, value) in (tile..).zip(out) {
                    *value = values[row * cols + first + col];
                }
            }
        }
    });
    out
}

/// Fields of words, low bits first: `[.., words]` as `[.., words * 32 / bits]`.
pub fn fields(words: &[u32], bits: u32) -> Vec<u8> {
    let (mask, in_word) = ((1 << bits) - 1, (32 / bits) as usize);
    let mut out = vec![0u8; words.len() * in_word];
    pool::for_rows(&mut out, in_word, GRAIN * TILE, |first, part| {
        for (word, fields) in words[first..].iter().zip(part.chunks_exact_mut(in_word)) {
            for (i, field) in (0..).zip(fields) {
                *field = (word >> (i * bits) & mask) as u8;
            }
        }
    });
    out
}

/// Codes `[rows, cols]` out of their words, signed ones plus 128.
pub fn unpack(words: &[u32], (rows, cols): (usize, usize), layout: WordLayout) -> Vec<u8> {
    let mask = (1 << layout.bits) - 1;
    let flip = if layout.signed { 0x80 } else { 0 };
    let mut codes = vec![0u8; rows * cols];
    pool::for_rows(&mut codes, cols, GRAIN, |first, part| {
        let count = part.len() / cols;
        for tile in (0..cols).step_by(TILE) {
            let end = (tile + TILE).min(cols);
            for row in 0..count {
                let out = &mut part[row * cols + tile..row * cols + end];
                for (col, code) in (tile..).zip(out) {
                    let (word, shift) = layout.place(first + row, col);
                    *code = (words[word] >> shift & mask) as u8 ^ flip;
                }
            }
        }
    });
    codes
}
