//! Reading candle's storages: any layout, any float type, as plain slices.

use crate::cpu::vector::Element;
#[cfg(feature = "cuda")]
pub(crate) use crate::cuda::dtype_index;
use candle_core::{
    CpuStorage, DType, Device, DeviceLocation, Layout, Result, Storage, Tensor, WithDType, bail,
};
use half::{bf16, f16};
use std::borrow::Cow;
use std::ops::Range;

/// A float type that the ops take: f32, f16 or bf16, computed in f32.
pub trait Float: WithDType + Element {
    /// All values widened; f32 is borrowed.
    fn widen_slice(values: &[Self]) -> Cow<'_, [f32]> {
        Cow::Owned(values.iter().map(|v| v.to_f32()).collect())
    }

    /// The values themselves, if they are f32.
    fn as_f32(_: &[Self]) -> Option<&[f32]> {
        None
    }

    /// The values themselves, if they are bf16.
    fn as_bf16(_: &[Self]) -> Option<&[bf16]> {
        None
    }
}

impl Float for f32 {
    fn widen_slice(values: &[Self]) -> Cow<'_, [f32]> {
        Cow::Borrowed(values)
    }

    fn as_f32(values: &[Self]) -> Option<&[f32]> {
        Some(values)
    }
}

impl Float for f16 {}

impl Float for bf16 {
    fn as_bf16(values: &[Self]) -> Option<&[bf16]> {
        Some(values)
    }
}

/// Fails unless the ops compute in `dtype`.
pub(crate) fn float(op: &str, argument: &str, dtype: DType) -> Result<()> {
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 => Ok(()),
        other => bail!("{op}: {argument} is {other:?}, expected f32, f16 or bf16"),
    }
}

/// Fails unless an argument has x's dtype and device.
pub(super) fn check_kind(op: &str, argument: &str, t: &Tensor, x: &Tensor) -> Result<()> {
    if t.dtype() != x.dtype() {
        bail!("{op}: {argument} is {:?}, x is {:?}", t.dtype(), x.dtype());
    }
    if !t.device().same_device(x.device()) {
        bail!("{op}: {argument} and x are on different devices");
    }
    Ok(())
}

/// Fails unless an argument has x's shape, dtype and device.
pub(super) fn check_like(op: &str, argument: &str, t: &Tensor, x: &Tensor) -> Result<()> {
    if t.dims() != x.dims() {
        bail!(
            "{op}: {argument} has shape {:?}, x has {:?}",
            t.shape(),
            x.shape()
        );
    }
    check_kind(op, argument, t, x)
}

/// Fails if a tensor is where no op runs, or [is tracked for gradients](inference_only).
pub(super) fn check_tensors<'a>(
    op: &str,
    tensors: impl IntoIterator<Item = (&'static str, &'a Tensor)>,
) -> Result<()> {
    tensors.into_iter().try_for_each(|(name, t)| {
        check_place(op, name, t.device().location())?;
        inference_only(op, [(name, t)])
    })
}

fn check_place(op: &str, name: &str, place: DeviceLocation) -> Result<()> {
    match place {
        DeviceLocation::Cpu | DeviceLocation::Cuda { .. } => Ok(()),
        DeviceLocation::Metal { .. } => bail!(
            "{op}: {name} is on {place:?}, expected the CPU or a CUDA device: without fusions models and layers take \
             candle's own operations"
        ),
    }
}

/// Fails if a tensor is a variable or was computed from one: the ops have no gradients, and training
/// would go on without them unseen.
pub(crate) fn inference_only<'a>(
    op: &str,
    tensors: impl IntoIterator<Item = (&'static str, &'a Tensor)>,
) -> Result<()> {
    match tensors.into_iter().find(|(_, t)| t.track_op()) {
        Some((name, _)) => bail!(
            "{op}: {name} is tracked for gradients, which would stop here: it is for inference only, \
             detach() the tensor"
        ),
        None => Ok(()),
    }
}

/// The tensor as it is on the CPU, whose cores gather strided elements; in row-major order on a
/// GPU, copied if need be.
pub(super) fn dense_on_cuda(t: &Tensor) -> Result<Tensor> {
    if t.device().is_cuda() {
        t.contiguous()
    } else {
        Ok(t.clone())
    }
}

/// The elements in row-major order as float64, wherever they are: what the plain forms compute on.
pub(super) fn float64(t: &Tensor) -> Result<Vec<f64>> {
    t.to_device(&Device::Cpu)?
        .to_dtype(DType::F64)?
        .flatten_all()?
        .to_vec1()
}

/// The addresses of a tensor's elements, from the first byte to one past the last.
pub(super) fn span(op: &str, name: &str, t: &Tensor) -> Result<Range<usize>> {
    let (storage, layout) = t.storage_and_layout();
    let start = match &*storage {
        Storage::Cpu(CpuStorage::F32(v)) => v.as_ptr().addr(),
        Storage::Cpu(CpuStorage::F16(v)) => v.as_ptr().addr(),
        Storage::Cpu(CpuStorage::BF16(v)) => v.as_ptr().addr(),
        Storage::Cpu(CpuStorage::U32(v)) => v.as_ptr().addr(),
        Storage::Cpu(CpuStorage::U8(v)) => v.as_ptr().addr(),
        #[cfg(feature = "cuda")]
        Storage::Cuda(storage) => {
            let whole = Layout::contiguous(layout.shape());
            crate::cuda::address(storage, &whole)? as usize
        }
        _ => bail!("{op}: {name} is {:?}, expected f32, f16 or bf16", t.dtype()),
    };
    let size = t.dtype().size_in_bytes();
    Ok(match reach(layout) {
        Some(last) => start + layout.start_offset() * size..start + (last + 1) * size,
        None => start..start,
    })
}

/// Fails if a tensor that is to be written in place overlaps another one of `written` or of `read` in
/// memory, whichever tensors they are views of.
pub(super) fn check_apart(
    op: &str,
    written: &[(&str, &Tensor)],
    read: &[(&str, &Tensor)],
) -> Result<()> {
    for (i, (name, tensor)) in written.iter().enumerate() {
        let own = span(op, name, tensor)?;
        for (other_name, other) in written[..i].iter().chain(read) {
            let other = span(op, other_name, other)?;
            if own.start < other.end && other.start < own.end {
                bail!(
                    "{op}: {name} and {other_name} overlap in memory, {name} is written in place"
                );
            }
        }
    }
    Ok(())
}

/// Fails if a tensor on the CPU that is read while `written` are written in place has a storage with one
/// of them: a storage is locked as a whole.
pub(super) fn check_storages(
    op: &str,
    written: &[(&str, &Tensor)],
    (name, read): (&str, &Tensor),
) -> Result<()> {
    let place = |t: &Tensor| std::ptr::from_ref(&*t.storage_and_layout().0).addr();
    let own = place(read);
    for (other, tensor) in written {
        if read.device().is_cpu() && place(tensor) == own {
            bail!("{op}: {name} and {other} are views of one storage, {other} is written in place");
        }
    }
    Ok(())
}

/// The CPU side of a storage; the guards of every op have checked that there is one.
pub fn cpu_storage(storage: &Storage) -> Result<&CpuStorage> {
    match storage {
        Storage::Cpu(storage) => Ok(storage),
        _ => bail!("expected a tensor on the CPU"),
    }
}

/// The tensor's elements in row-major order: borrowed where the layout is contiguous, gathered
/// where it is strided or broadcast.
pub fn elements<'a, T: Float>(storage: &'a CpuStorage, layout: &Layout) -> Result<Cow<'a, [T]>> {
    let data = storage.as_slice::<T>()?;
    // An empty view may begin behind the end of an empty storage.
    let Some(reach) = reach(layout) else {
        return Ok(Cow::Borrowed(&[]));
    };
    if let Some((start, end)) = layout.contiguous_offsets() {
        return match data.get(start..end) {
            Some(slice) => Ok(Cow::Borrowed(slice)),
            None => bail!(
                "layout {layout:?} reaches past its storage of {} elements",
                data.len()
            ),
        };
    }
    if reach >= data.len() {
        bail!(
            "layout {layout:?} reaches past its storage of {} elements",
            data.len()
        );
    }
    let mut out = Vec::with_capacity(layout.shape().elem_count());
    gather(
        data,
        layout.dims(),
        layout.stride(),
        layout.start_offset(),
        &mut out,
    );
    Ok(Cow::Owned(out))
}

/// The highest storage index that the layout touches; none for an empty tensor.
fn reach(layout: &Layout) -> Option<usize> {
    let mut last = layout.start_offset();
    for (dim, stride) in layout.dims().iter().zip(layout.stride()) {
        last += dim.checked_sub(1)? * stride;
    }
    Some(last)
}

/// What the trace says of an input that [`elements`] has to gather.
pub(super) fn gathered(layout: &Layout) -> &'static str {
    if layout.is_contiguous() {
        ""
    } else {
        ": a view, gathered first"
    }
}

fn gather<T: Copy>(data: &[T], dims: &[usize], strides: &[usize], offset: usize, out: &mut Vec<T>) {
    match (dims, strides) {
        ([], _) | (_, []) => out.push(data[offset]),
        ([n], [1]) => out.extend_from_slice(&data[offset..offset + n]),
        ([n, dims @ ..], [stride, strides @ ..]) => {
            (0..*n).for_each(|i| gather(data, dims, strides, offset + i * stride, out));
        }
    }
}

/// Calls `$body` with `$t` standing for the Rust type of `$dtype` (f32, f16, bf16), or fails with
/// an error that names the op and the argument.
macro_rules! dispatch_float {
    ($dtype:expr, $op:expr, $arg:expr, $t:ident => $body:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $t = f32;
                $body
            }
            candle_core::DType::F16 => {
                type $t = half::f16;
                $body
            }
            candle_core::DType::BF16 => {
                type $t = half::bf16;
                $body
            }
            other => {
                candle_core::bail!("{}: {} is {other:?}, expected f32, f16 or bf16", $op, $arg)
            }
        }
    };
}
pub(crate) use dispatch_float;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_devices_are_refused_by_name() {
        for place in [DeviceLocation::Cpu, DeviceLocation::Cuda { gpu_id: 1 }] {
            assert!(check_place("rms_norm", "x", place).is_ok());
        }
        let place = DeviceLocation::Metal { gpu_id: 0 };
        let error = check_place("rope_append", "k", place)
            .unwrap_err()
            .to_string();
        let expected =
            "rope_append: k is on Metal { gpu_id: 0 }, expected the CPU or a CUDA device";
        assert!(error.starts_with(expected), "{error}");
    }
}
