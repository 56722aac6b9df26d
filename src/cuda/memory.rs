//! Candle's CUDA storages as addresses.
//!
//! On one thread a device of candle's has one stream, on which its storages are allocated, used and
//! freed and all our kernels run: an address taken here stays good for every launch that the thread
//! makes before the storage is dropped.

use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::cuda_backend::cudarc::driver::{
    CudaSlice, CudaStream, DevicePtr, DeviceRepr, DriverError, result, sys,
};
use candle_core::op::BackpropOp;
use candle_core::{
    CudaDevice, CudaStorage, DType, Device, Error, Layout, Result, Storage, Tensor, bail,
};

/// An address in a GPU's memory, as kernels take it; 0 stands for no tensor.
pub(crate) type Address = u64;

/// The CUDA side of a storage; the guards of every op have checked that there is one.
pub(crate) fn cuda_storage(storage: &Storage) -> Result<&CudaStorage> {
    match storage {
        Storage::Cuda(storage) => Ok(storage),
        _ => bail!("expected a tensor on a CUDA device"),
    }
}

/// The address of the layout's first element.
pub(crate) fn address(storage: &CudaStorage, layout: &Layout) -> Result<Address> {
    fn start<T>(slice: &CudaSlice<T>, stream: &CudaStream) -> Address {
        slice.device_ptr(stream).0
    }
    let stream = storage.device.cuda_stream();
    let (base, size) = match &storage.slice {
        CudaStorageSlice::F32(s) => (start(s, &stream), 4),
        CudaStorageSlice::F16(s) => (start(s, &stream), 2),
        CudaStorageSlice::BF16(s) => (start(s, &stream), 2),
        CudaStorageSlice::U32(s) => (start(s, &stream), 4),
        CudaStorageSlice::I32(s) => (start(s, &stream), 4),
        CudaStorageSlice::I64(s) => (start(s, &stream), 8),
        CudaStorageSlice::U8(s) => (start(s, &stream), 1),
        CudaStorageSlice::F8E4M3(s) => (start(s, &stream), 1),
        _ => bail!("expected a tensor of f32, f16, bf16, f8e4m3, u32, i32, i64 or u8"),
    };
    Ok(base + (layout.start_offset() * size) as u64)
}

/// The address of a tensor's first element.
pub(crate) fn address_of(t: &Tensor) -> Result<Address> {
    let (storage, layout) = t.storage_and_layout();
    address(cuda_storage(&storage)?, layout)
}

/// A storage of `len` elements with whatever the memory holds: every one of them is to be written.
pub(crate) fn alloc(
    op: &str,
    device: &CudaDevice,
    dtype: DType,
    len: usize,
) -> Result<CudaStorage> {
    fn take<T: DeviceRepr>(device: &CudaDevice, len: usize) -> Result<CudaSlice<T>> {
        // SAFETY: the types are plain numbers, and the caller has a kernel write all of them. The
        // driver does not allocate nothing.
        unsafe { device.alloc::<T>(len.max(1)) }
    }
    let slice = match dtype {
        DType::F32 => take(device, len).map(CudaStorageSlice::F32),
        DType::F16 => take(device, len).map(CudaStorageSlice::F16),
        DType::BF16 => take(device, len).map(CudaStorageSlice::BF16),
        DType::U32 => take(device, len).map(CudaStorageSlice::U32),
        DType::I32 => take(device, len).map(CudaStorageSlice::I32),
        DType::U8 => take(device, len).map(CudaStorageSlice::U8),
        DType::F8E4M3 => take(device, len).map(CudaStorageSlice::F8E4M3),
        other => bail!(
            "{op}: no CUDA storage of {other:?}, expected f32, f16, bf16, f8e4m3, u32, i32 or u8"
        ),
    };
    match slice {
        Ok(slice) => Ok(CudaStorage {
            slice,
            device: device.clone(),
        }),
        Err(e) => {
            let bytes = len * dtype.size_in_bytes();
            let stream = device.cuda_stream();
            match stream.context().mem_get_info() {
                Ok((free, total)) => bail!(
                    "{op}: no {bytes} bytes for the result on the GPU, where {free} of {total} are \
                     free: {e}"
                ),
                Err(_) => Err(e),
            }
        }
    }
}

/// Copies the first `slots` of `[.., S, D]` into the first of `[.., S', D]`: one copy by the
/// driver, where candle would have to have two kernels compiled.
pub(crate) fn copy_slots(from: &Tensor, to: &Tensor, slots: usize) -> Result<()> {
    let [planes @ .., from_slots, width] = from.dims() else {
        bail!(
            "copy_slots: a tensor of shape {:?}, expected [.., S, D]",
            from.shape()
        );
    };
    let fits = to.dims().len() == from.dims().len()
        && to.dims().starts_with(planes)
        && to.dims().ends_with(&[*width])
        && slots <= *from_slots.min(&to.dims()[planes.len()])
        && from.dtype() == to.dtype()
        && from.is_contiguous()
        && to.is_contiguous();
    if !fits {
        bail!(
            "copy_slots: {slots} slots of {:?} do not go into {:?}",
            from.shape(),
            to.shape()
        );
    }
    let Device::Cuda(device) = to.device() else {
        bail!("copy_slots: expected tensors on a CUDA device");
    };
    let line = width * from.dtype().size_in_bytes();
    let copy = sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
        srcHost: std::ptr::null(),
        srcDevice: address_of(from)?,
        srcArray: std::ptr::null_mut(),
        srcPitch: from_slots * line,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
        dstHost: std::ptr::null_mut(),
        dstDevice: address_of(to)?,
        dstArray: std::ptr::null_mut(),
        dstPitch: to.dims()[planes.len()] * line,
        WidthInBytes: slots * line,
        Height: planes.iter().product(),
    };
    if copy.WidthInBytes * copy.Height == 0 {
        return Ok(());
    }
    super::Gpu::of(device)?.bind()?;
    // SAFETY: both tensors have that many planes with that many slots; the copy is ordered by the
    // stream on which both are used and freed.
    unsafe { sys::cuMemcpy2DAsync_v2(&copy, device.cuda_stream().cu_stream()) }
        .result()
        .map_err(|e: DriverError| Error::wrap(e))
}

/// Matrices `[N_i, K]` of one dtype and device as one `[sum of N_i, K]`.
pub(crate) fn stack_rows(parts: &[&Tensor]) -> Result<Tensor> {
    let (dtype, cols) = (parts[0].dtype(), parts[0].dim(1)?);
    let rows = parts.iter().map(|p| p.dims()[0]).sum::<usize>();
    let Device::Cuda(device) = parts[0].device() else {
        bail!("stack_rows: expected matrices on a CUDA device");
    };
    let out = alloc("linear", device, dtype, rows * cols)?;
    let mut to = address(&out, &Layout::contiguous(rows * cols))?;
    let stream = device.cuda_stream().cu_stream();
    for part in parts {
        if part.dtype() != dtype || part.dim(1)? != cols || !part.is_contiguous() {
            bail!("stack_rows: expected contiguous matrices of one dtype and width");
        }
        let bytes = part.elem_count() * dtype.size_in_bytes();
        // SAFETY: both ranges are allocated; the copy is ordered by the stream on which both are
        // used and freed.
        unsafe { result::memcpy_dtod_async(to, address_of(part)?, bytes, stream) }
            .map_err(Error::wrap)?;
        to += bytes as u64;
    }
    let shape = (rows, cols);
    Ok(Tensor::from_storage(
        Storage::Cuda(out),
        shape,
        BackpropOp::none(),
        false,
    ))
}
