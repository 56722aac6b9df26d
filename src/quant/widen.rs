//! Numbers of 16 bits on the host in f32.

use crate::pool;
use candle_core::{CpuStorage, DType, Result, Storage, Tensor};

/// What `take` makes of a tensor's values in f32, in the order of rows. All threads widen those of 16 bits.
///
/// # Errors
/// If the tensor holds no numbers.
pub(crate) fn widened<T>(tensor: &Tensor, take: impl FnOnce(&[f32]) -> T) -> Result<T> {
    let (storage, layout) = tensor.storage_and_layout();
    if let (Storage::Cpu(storage), Some((start, end))) = (&*storage, layout.contiguous_offsets()) {
        match storage {
            CpuStorage::F32(values) => return Ok(take(&values[start..end])),
            CpuStorage::F16(values) => {
                return Ok(take(&pool::map(&values[start..end], |v| v.to_f32())));
            }
            CpuStorage::BF16(values) => {
                return Ok(take(&pool::map(&values[start..end], |v| v.to_f32())));
            }
            _ => {}
        }
    }
    let values = tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
    Ok(take(&values))
}
