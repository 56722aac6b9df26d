//! The tensors of safetensors files, read by position. No file is mapped: of a tensor that goes to a GPU as it is the process
//! holds no more than the parts that are on their way, and a file that is cut while it is read is an error.

#[cfg(feature = "cuda")]
use crate::cuda::upload_tensor_from;
use crate::nn::pack::named;
use crate::pool;
use bytemuck::allocation::try_zeroed_slice_box;
use bytemuck::{Pod, cast_slice_mut};
#[cfg(feature = "cuda")]
use candle_core::DType;
use candle_core::safetensors::Load;
use candle_core::{Device, Error, Result, Tensor, WithDType, bail};
use half::{bf16, f16};
use safetensors::tensor::{Metadata, TensorInfo, TensorView};
use safetensors::{Dtype, SafeTensorError};
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Bytes that a thread reads at least.
const GRAIN: usize = 256 << 10;

/// Bytes in front of the header: its length.
const LENGTH: usize = size_of::<u64>();

/// More bytes than any header has, as the format says.
const LONGEST_HEADER: u64 = 100_000_000;

/// The files of a checkpoint. Of tensors with one name the last file's counts.
pub struct Shards {
    files: Vec<Shard>,
    tensors: HashMap<String, Entry>,
}

struct Shard {
    path: PathBuf,
    file: File,
}

/// A tensor of one of the files.
struct Entry {
    shard: usize,
    /// Its first byte in the file.
    at: u64,
    info: TensorInfo,
}

impl Entry {
    fn bytes(&self) -> usize {
        self.info.data_offsets.1 - self.info.data_offsets.0
    }
}

impl Shards {
    /// # Errors
    /// If a file cannot be read, or is no whole safetensors file.
    pub fn open(paths: &[impl AsRef<Path>]) -> Result<Self> {
        let mut files = Vec::with_capacity(paths.len());
        let mut tensors = HashMap::new();
        for (shard, path) in paths.iter().enumerate() {
            let path = path.as_ref();
            let of_path = |e: Error| e.with_path(path);
            let mut file = File::open(path).map_err(|e| of_path(e.into()))?;
            let (start, header) = read_header(&mut file).map_err(of_path)?;
            for (name, info) in header.tensors() {
                let entry = Entry {
                    shard,
                    at: start + info.data_offsets.0 as u64,
                    info: info.clone(),
                };
                tensors.insert(name, entry);
            }
            files.push(Shard {
                path: path.to_owned(),
                file,
            });
        }
        Ok(Self { files, tensors })
    }

    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// A tensor as it is stored; signed bytes, which candle has not, as unsigned ones of the same bits.
    ///
    /// # Errors
    /// If there is none of this name, candle has no such dtype, the file cannot be read, or there is not so much memory.
    pub fn tensor(&self, name: &str, device: &Device) -> Result<Tensor> {
        let Some(entry) = self.tensors.get(name) else {
            let path = name.to_owned();
            return Err(Error::CannotFindTensor { path }.bt());
        };
        named(name, self.load(entry, device))
    }

    fn load(&self, entry: &Entry, device: &Device) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if let (Device::Cuda(device), Some(dtype)) = (device, on_gpu(entry.info.dtype)) {
            let read = |first: usize, out: &mut [u8]| self.read(entry, first, out);
            return upload_tensor_from(dtype, &entry.info.shape, device, read);
        }
        match entry.info.dtype {
            Dtype::F32 => self.values::<f32>(entry)?,
            Dtype::F16 => self.values::<f16>(entry)?,
            Dtype::BF16 => self.values::<bf16>(entry)?,
            Dtype::F64 => self.values::<f64>(entry)?,
            Dtype::I64 => self.values::<i64>(entry)?,
            Dtype::I32 => self.values::<i32>(entry)?,
            Dtype::U32 => self.values::<u32>(entry)?,
            Dtype::U8 | Dtype::I8 => self.values::<u8>(entry)?,
            other => {
                let bytes = self.all::<u8>(entry)?;
                let view = TensorView::new(other, entry.info.shape.clone(), &bytes);
                return view?.load(device);
            }
        }
        .to_device(device)
    }

    fn values<T: Pod + WithDType>(&self, entry: &Entry) -> Result<Tensor> {
        Tensor::from_vec(
            self.all::<T>(entry)?,
            entry.info.shape.as_slice(),
            &Device::Cpu,
        )
    }

    /// All values of a tensor, which all threads read.
    fn all<T: Pod + Send>(&self, entry: &Entry) -> Result<Vec<T>> {
        let count = entry.bytes() / size_of::<T>();
        // Zeros that the system hands out where they are touched: each thread has its pages made.
        let Ok(mut values) = try_zeroed_slice_box::<T>(count) else {
            bail!("no memory for {} bytes", entry.bytes());
        };
        let out = cast_slice_mut::<T, u8>(&mut values);
        pool::try_for_rows(out, 1, GRAIN, |first, out| self.read(entry, first, out))?;
        Ok(values.into_vec())
    }

    /// Reads the bytes of a tensor from `first` on.
    fn read(&self, entry: &Entry, first: usize, out: &mut [u8]) -> Result<()> {
        let Shard { path, file } = &self.files[entry.shard];
        let read = read_exact_at(file, entry.at + first as u64, out);
        read.map_err(|e| Error::from(e).with_path(path))
    }
}

/// What the header of a whole file says, and where the bytes of tensors begin.
fn read_header(file: &mut File) -> Result<(u64, Metadata)> {
    let size = file.metadata()?.len();
    let mut length = [0; LENGTH];
    if size < LENGTH as u64 {
        return Err(SafeTensorError::HeaderTooSmall.into());
    }
    file.read_exact(&mut length)?;
    let length = u64::from_le_bytes(length);
    if length > LONGEST_HEADER {
        return Err(SafeTensorError::HeaderTooLarge.into());
    }
    let start = LENGTH as u64 + length;
    if start > size {
        return Err(SafeTensorError::InvalidHeaderLength.into());
    }
    let mut header = vec![0; length as usize];
    file.read_exact(&mut header)?;
    // Which checks that tensors lie one behind the other, each with the bytes of its shape.
    let header: Metadata =
        serde_json::from_slice(&header).map_err(SafeTensorError::InvalidHeaderDeserialization)?;
    if start + header.data_len() as u64 != size {
        return Err(SafeTensorError::MetadataIncompleteBuffer.into());
    }
    Ok((start, header))
}

#[cfg(unix)]
fn read_exact_at(file: &File, at: u64, out: &mut [u8]) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, out, at)
}

#[cfg(windows)]
fn read_exact_at(file: &File, mut at: u64, mut out: &mut [u8]) -> io::Result<()> {
    while !out.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, out, at) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => (at, out) = (at + count as u64, &mut out[count..]),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

#[cfg(not(any(unix, windows)))]
fn read_exact_at(_: &File, _: u64, _: &mut [u8]) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// What tensors of a GPU's memory have of a stored dtype: the same bits. Of others candle knows more.
#[cfg(feature = "cuda")]
fn on_gpu(stored: Dtype) -> Option<DType> {
    match stored {
        Dtype::F32 => Some(DType::F32),
        Dtype::F16 => Some(DType::F16),
        Dtype::BF16 => Some(DType::BF16),
        Dtype::F8_E4M3 => Some(DType::F8E4M3),
        Dtype::I32 => Some(DType::I32),
        Dtype::U32 => Some(DType::U32),
        Dtype::U8 | Dtype::I8 => Some(DType::U8),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::DType;
    use safetensors::serialize_to_file;
    use std::fs::OpenOptions;
    use tempfile::TempDir;

    /// Values of a tensor: some more than a thread reads at least.
    const COUNT: usize = GRAIN + 3;

    fn written(dtype: Dtype, bytes: &[u8]) -> Result<(TempDir, PathBuf)> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("model.safetensors");
        let count = bytes.len() * 8 / dtype.bitsize();
        let views = [
            ("a", TensorView::new(Dtype::U8, vec![1], &[7])?),
            ("b", TensorView::new(dtype, vec![count], bytes)?),
        ];
        serialize_to_file(views, None, &path)?;
        Ok((folder, path))
    }

    fn devices() -> Vec<Device> {
        let gpu = Device::cuda_if_available(0).ok().filter(Device::is_cuda);
        [Some(Device::Cpu), gpu].into_iter().flatten().collect()
    }

    #[test]
    fn every_dtype_comes_as_it_is_stored() -> Result<()> {
        for (stored, dtype) in [
            (Dtype::F32, DType::F32),
            (Dtype::F16, DType::F16),
            (Dtype::BF16, DType::BF16),
            (Dtype::F64, DType::F64),
            (Dtype::I64, DType::I64),
            (Dtype::I32, DType::I32),
            (Dtype::U32, DType::U32),
            (Dtype::U8, DType::U8),
            (Dtype::F8_E4M3, DType::F8E4M3),
        ] {
            // No exponent is that of a NaN.
            let size = dtype.size_in_bytes();
            let bytes: Vec<u8> = (0..COUNT * size)
                .map(|i| ((i * 7 + i / 251) % 61 + 8) as u8)
                .collect();
            let (_folder, path) = written(stored, &bytes)?;
            let shards = Shards::open(&[path])?;
            assert_eq!(shards.len(), 2);
            let expected = Tensor::from_raw_buffer(&bytes, dtype, &[COUNT], &Device::Cpu)?;
            // candle 0.11.1's conversion of FP8 to f64 does not end.
            let comparable = match dtype {
                DType::F64 | DType::I64 => dtype,
                _ => DType::F32,
            };
            let differ = |a: &Tensor, b: &Tensor| {
                let differ = a.to_dtype(comparable)?.ne(&b.to_dtype(comparable)?)?;
                differ.to_dtype(DType::F32)?.sum_all()?.to_scalar::<f32>()
            };
            for device in devices() {
                let tensor = shards.tensor("b", &device)?;
                assert_eq!(tensor.dtype(), dtype, "{device:?}");
                let tensor = tensor.to_device(&Device::Cpu)?;
                assert_eq!(differ(&tensor, &expected)?, 0., "{stored:?} on {device:?}");
            }
        }
        let (_folder, path) = written(Dtype::I8, &[255, 1])?;
        let signed = Shards::open(&[path])?.tensor("b", &Device::Cpu)?;
        assert_eq!(signed.to_vec1::<u8>()?, [255, 1]);
        Ok(())
    }

    #[test]
    fn the_last_of_several_files_counts() -> Result<()> {
        let (_first, one) = written(Dtype::U8, &[1])?;
        let (_second, two) = written(Dtype::U8, &[2, 3])?;
        let shards = Shards::open(&[one, two])?;
        let tensor = shards.tensor("b", &Device::Cpu)?;
        assert_eq!(tensor.to_vec1::<u8>()?, [2, 3]);
        assert!(shards.contains("a") && !shards.contains("c"));
        let error = shards.tensor("c", &Device::Cpu).unwrap_err();
        assert!(error.to_string().contains('c'), "{error}");
        Ok(())
    }

    #[test]
    fn what_is_no_whole_file_is_refused() -> Result<()> {
        let (_folder, path) = written(Dtype::U8, &[1; COUNT])?;
        let whole = std::fs::read(&path)?;
        let header = LENGTH + u64::from_le_bytes(whole[..LENGTH].try_into().expect("8")) as usize;
        let mut long = whole.clone();
        long[..LENGTH].copy_from_slice(&u64::MAX.to_le_bytes());
        let more = [whole.as_slice(), &[0]].concat();
        for bytes in [
            &whole[..0],
            &whole[..LENGTH - 1],
            &whole[..LENGTH],
            &whole[..header - 1],
            &whole[..header],
            &whole[..whole.len() - 1],
            more.as_slice(),
            long.as_slice(),
        ] {
            std::fs::write(&path, bytes)?;
            let error = Shards::open(&[&path]).err().expect("an error").to_string();
            assert!(error.contains("model.safetensors"), "{error}");
        }
        assert!(Shards::open(&[path.with_extension("none")]).is_err());
        Ok(())
    }

    #[test]
    fn a_file_that_is_cut_later_is_an_error() -> Result<()> {
        let (_folder, path) = written(Dtype::F32, &[0; 4 * COUNT])?;
        let shards = Shards::open(&[&path])?;
        let file = OpenOptions::new().write(true).open(&path)?;
        file.set_len(file.metadata()?.len() / 2)?;
        for device in devices() {
            let error = shards.tensor("b", &device).unwrap_err().to_string();
            assert!(error.contains("`b`") && error.contains("model.safetensors"));
        }
        Ok(())
    }
}
