//! Reading candle's storages: any layout, any float type, as plain slices.

use candle_core::{CpuStorage, Layout, Result, Storage, WithDType, bail};
use half::{bf16, f16};
use std::borrow::Cow;

use crate::cpu::Lanes;

/// A float type that the ops take: f32, f16 or bf16, computed in f32.
pub trait Float: WithDType + Copy + Send + Sync {
    /// The value widened, which is exact.
    fn widen(self) -> f32;
    /// The value rounded to this type, to nearest even.
    fn narrow(value: f32) -> Self;
    /// All values widened; f32 is borrowed.
    fn widen_slice(values: &[Self]) -> Cow<'_, [f32]> {
        Cow::Owned(values.iter().map(|v| v.widen()).collect())
    }
    /// Reads and widens a vector.
    ///
    /// # Safety
    /// As [`Lanes`]: `L::N` elements may be read from `p`.
    unsafe fn load<L: Lanes>(p: *const Self) -> L;
    /// Rounds a vector to this type, to nearest even, and writes it.
    ///
    /// # Safety
    /// As [`Lanes`]: `L::N` elements may be written to `p`.
    unsafe fn store<L: Lanes>(vector: L, p: *mut Self);
}

impl Float for f32 {
    fn widen(self) -> f32 {
        self
    }
    fn narrow(value: f32) -> Self {
        value
    }
    fn widen_slice(values: &[Self]) -> Cow<'_, [f32]> {
        Cow::Borrowed(values)
    }
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const Self) -> L {
        // SAFETY: the caller's obligation is the same.
        unsafe { L::load_f32(p) }
    }
    #[inline(always)]
    unsafe fn store<L: Lanes>(vector: L, p: *mut Self) {
        // SAFETY: the caller's obligation is the same.
        unsafe { vector.store_f32(p) }
    }
}

impl Float for f16 {
    fn widen(self) -> f32 {
        self.to_f32()
    }
    fn narrow(value: f32) -> Self {
        f16::from_f32(value)
    }
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const Self) -> L {
        // SAFETY: the caller's obligation is the same.
        unsafe { L::load_f16(p) }
    }
    #[inline(always)]
    unsafe fn store<L: Lanes>(vector: L, p: *mut Self) {
        // SAFETY: the caller's obligation is the same.
        unsafe { vector.store_f16(p) }
    }
}

impl Float for bf16 {
    fn widen(self) -> f32 {
        self.to_f32()
    }
    fn narrow(value: f32) -> Self {
        bf16::from_f32(value)
    }
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const Self) -> L {
        // SAFETY: the caller's obligation is the same.
        unsafe { L::load_bf16(p) }
    }
    #[inline(always)]
    unsafe fn store<L: Lanes>(vector: L, p: *mut Self) {
        // SAFETY: the caller's obligation is the same.
        unsafe { vector.store_bf16(p) }
    }
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
    if let Some((start, end)) = layout.contiguous_offsets() {
        return match data.get(start..end) {
            Some(slice) => Ok(Cow::Borrowed(slice)),
            None => bail!(
                "layout {layout:?} reaches past its storage of {} elements",
                data.len()
            ),
        };
    }
    let Some(reach) = reach(layout) else {
        return Ok(Cow::Owned(Vec::new()));
    };
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
