//! Quantizing weights where they are on a GPU: the host's side of `kernels/formats/quantize_weights.cu`.

use super::abi::{self, FP8_BLOCK, QUANTIZE_THREADS, QUANTIZE_WARPS, QuantizeWeightsParams, WARP};
use super::packed::PackedLayout;
use super::{Address, BlockMatrix, Grid, Launcher, Module, address_of, dtype_index, fatbin};
use crate::quant::{Codes, Scheme, TernaryScale, e2m1, e4m3, search};
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, DeviceRepr};
use candle_core::{CudaDevice, DType, Device, Error, Result, Tensor};

#[cfg(test)]
mod tests;

static MODULE: Module = Module::new(
    "quantize_weights",
    fatbin!("quantize_weights"),
    &[
        "quantize_weights_int8",
        "quantize_weights_int4",
        "quantize_weights_int4_zeros",
        "quantize_weights_fp8",
        "quantize_weights_nf4",
        "quantize_weights_nvfp4",
        "quantize_weights_largest",
        "quantize_weights_ternary_group",
        "quantize_weights_ternary_row",
    ],
);

/// The kernel that finds the largest magnitude.
const LARGEST: usize = 6;

/// Blocks that look for the largest magnitude: some for each multiprocessor.
const LARGEST_BLOCKS: usize = 1024;

// What the kernels go by is what the CPU goes by.
const _: () = {
    assert!(abi::CLIPS == search::CLIPS && abi::CLIP_STEP == search::CLIP_STEP);
    assert!(abi::ENDS == search::ENDS && abi::ROUNDS == search::ROUNDS);
    assert!(abi::NEAR == search::NEAR as usize && abi::NEAR_STEP == search::NEAR_STEP);
    assert!(abi::ROUND == search::ROUND && abi::TRIAL_LANES == 16 && abi::MAX_GROUP == 128);
    assert!(abi::SEARCH_TINY == search::TINY && abi::FP8_TINY == e4m3::TINY);
    assert!(abi::E4M3_MAX == e4m3::MAX && abi::E2M1_MAX == e2m1::MAX);
    assert!(abi::ZERO_STEP == crate::quant::ZERO_STEP);
    assert!(abi::ZERO_MIDDLE == crate::quant::MIDDLE as usize);
};

impl BlockMatrix {
    /// Quantizes weights `[rows, cols]` on their GPU, bit for bit as [`quantize`](crate::quant::quantize) and
    /// [`Self::from_codes`] do. Nothing if the host has to do it: where the device's memory does not suffice, of ternary weights with one scale for the matrix, of a
    /// dtype that is not f32, f16 or bf16, and of what it would refuse. Beside the matrix there is a byte for each code in
    /// the device's memory meanwhile.
    ///
    /// # Errors
    /// If `weight` is not a matrix, or the device's memory does not suffice.
    pub(crate) fn quantize(weight: &Tensor, scheme: Scheme) -> Result<Option<Self>> {
        let (rows, cols) = weight.dims2()?;
        let Device::Cuda(device) = weight.device() else {
            return Ok(None);
        };
        let Ok(layout) = PackedLayout::new(scheme, rows, cols) else {
            return Ok(None);
        };
        let Some(plan) = Plan::of(scheme, rows, cols) else {
            return Ok(None);
        };
        if !matches!(weight.dtype(), DType::F32 | DType::F16 | DType::BF16) {
            return Ok(None);
        }
        let weight = weight.contiguous()?;
        let Some((codes, plain)) = quantized(&weight, scheme, plan, device)? else {
            return Ok(None);
        };
        // SAFETY: the kernel writes all codes, and those of NVFP4 as that asks; they are freed in the order of the stream.
        let data = unsafe { layout.pack_on_device(&codes, start(&plain), device)? };
        Self::of_codes(&codes, layout, data, weight.device()).map(Some)
    }
}

/// Which kernel quantizes, and how.
#[derive(Clone, Copy, Debug)]
struct Plan {
    kernel: usize,
    /// Values of a row, and rows, that share a scale.
    group: usize,
    height: usize,
    grid: Grid,
}

impl Plan {
    /// None for what the host does.
    fn of(scheme: Scheme, rows: usize, cols: usize) -> Option<Self> {
        let kernel = match scheme {
            Scheme::Int8 => 0,
            Scheme::Int4 { zero_point, .. } => 1 + usize::from(zero_point),
            Scheme::Fp8 | Scheme::Fp8Block128 => 3,
            Scheme::Nf4 => 4,
            Scheme::Nvfp4 => 5,
            Scheme::Ternary { scale } => match scale {
                TernaryScale::Group(_) => 7,
                TernaryScale::Row => 8,
                // Its weights are added up one by one.
                TernaryScale::Tensor => return None,
            },
        };
        let group = scheme.group().unwrap_or(cols);
        let height = match scheme {
            Scheme::Fp8Block128 => FP8_BLOCK,
            _ => 1,
        };
        let units = rows.div_ceil(height).checked_mul(cols.div_ceil(group))?;
        let (of_block, threads) = match scheme {
            Scheme::Int4 { .. } => (QUANTIZE_WARPS, QUANTIZE_WARPS * WARP),
            Scheme::Ternary { .. } if scheme.group().is_some() => {
                (QUANTIZE_WARPS, QUANTIZE_WARPS * WARP)
            }
            Scheme::Nf4 | Scheme::Nvfp4 => (2 * QUANTIZE_WARPS, QUANTIZE_WARPS * WARP),
            _ => (1, QUANTIZE_THREADS),
        };
        let blocks = u32::try_from(units.div_ceil(of_block)).ok()?;
        Some(Self {
            kernel,
            group,
            height,
            grid: Grid::line(blocks, threads as u32),
        })
    }
}

fn start<T: DeviceRepr>(slice: &CudaSlice<T>) -> Address {
    slice.device_ptr(slice.stream()).0
}

/// What a kernel writes.
struct Room {
    codes: CudaSlice<i8>,
    scales: Option<CudaSlice<f32>>,
    /// Zero points, or the e4m3 scales of NVFP4.
    zeros: Option<CudaSlice<u8>>,
    /// Whether the host has to do it, and the largest magnitude.
    words: CudaSlice<u32>,
}

impl Room {
    fn new(scheme: Scheme, (rows, cols): (usize, usize), device: &CudaDevice) -> Result<Self> {
        let scales = scheme.scale_count(rows, cols);
        let (scales, zeros) = match scheme {
            // The scales of its rows are all the same.
            Scheme::Nvfp4 => (0, scheme.group_scale_count(rows, cols)),
            _ if scheme.has_zeros() => (scales, scales),
            _ => (scales, 0),
        };
        // SAFETY: the kernel writes all of each.
        unsafe {
            Ok(Self {
                codes: device.alloc(rows * cols)?,
                scales: some(device, scales)?,
                zeros: some(device, zeros)?,
                words: device.alloc_zeros(2)?,
            })
        }
    }

    fn params(&self, weight: &Tensor, plan: &Plan) -> Result<QuantizeWeightsParams> {
        let (rows, cols) = weight.dims2()?;
        Ok(QuantizeWeightsParams {
            weights: address_of(weight)?,
            codes: start(&self.codes),
            scales: self.scales.as_ref().map_or(0, start),
            zeros: self.zeros.as_ref().map_or(0, start),
            refused: start(&self.words),
            largest: start(&self.words) + size_of::<u32>() as Address,
            rows: rows as u64,
            cols: u32::try_from(cols).map_err(Error::wrap)?,
            group: u32::try_from(plan.group).map_err(Error::wrap)?,
            height: plan.height as u32,
            dtype: dtype_index(weight.dtype()) as i32,
            global: 0.,
        })
    }

    /// The matrix without its codes.
    fn download(&self, scheme: Scheme, rows: usize, cols: usize, scale: f32) -> Result<Codes> {
        let zeros = downloaded(&self.zeros)?;
        let (scales, zeros, group_scales) = match scheme {
            Scheme::Nvfp4 => (vec![scale; rows], Vec::new(), zeros),
            _ => (downloaded(&self.scales)?, zeros, Vec::new()),
        };
        Ok(Codes {
            scheme,
            rows,
            cols,
            codes: Vec::new(),
            scales,
            zeros,
            group_scales,
        })
    }
}

/// The matrix without its codes, and these, which are still on the device. Nothing if a weight or a scale is no finite
/// number. The weight is contiguous.
fn quantized(
    weight: &Tensor,
    scheme: Scheme,
    plan: Plan,
    device: &CudaDevice,
) -> Result<Option<(Codes, CudaSlice<i8>)>> {
    let (rows, cols) = weight.dims2()?;
    // The host needs less of the device's memory.
    let Ok(room) = Room::new(scheme, (rows, cols), device) else {
        return Ok(None);
    };
    let mut params = room.params(weight, &plan)?;
    let launcher = Launcher::new(device)?;
    let mut scale = 0.;
    if scheme == Scheme::Nvfp4 {
        let blocks = (rows * cols).div_ceil(QUANTIZE_THREADS).min(LARGEST_BLOCKS);
        let grid = Grid::line(blocks as u32, QUANTIZE_THREADS as u32);
        // SAFETY: as below.
        unsafe { launcher.run(&MODULE, LARGEST, grid, &params)? };
        let largest = device.clone_dtoh(&room.words)?[1];
        (params.global, scale) = e2m1::global_scale(f32::from_bits(largest));
    }
    let bytes = rows * cols * (1 + weight.dtype().size_in_bytes());
    // SAFETY: the kernel takes `QuantizeWeightsParams`. The weight has its values one behind the other, and there is room for
    // what the plan has the kernel write; all is freed in the order of the stream.
    unsafe {
        launcher
            .moving(bytes as u64)
            .run(&MODULE, plan.kernel, plan.grid, &params)?
    };
    if device.clone_dtoh(&room.words)?[0] != 0 {
        return Ok(None);
    }
    let codes = room.download(scheme, rows, cols, scale)?;
    Ok(Some((codes, room.codes)))
}

/// Memory for some elements; none for none, which the driver does not allocate.
///
/// # Safety
/// As [`CudaDevice::alloc`].
unsafe fn some<T: DeviceRepr>(device: &CudaDevice, len: usize) -> Result<Option<CudaSlice<T>>> {
    // SAFETY: the caller's.
    (len > 0)
        .then(|| unsafe { device.alloc::<T>(len) })
        .transpose()
}

fn downloaded<T: DeviceRepr>(slice: &Option<CudaSlice<T>>) -> Result<Vec<T>> {
    let Some(slice) = slice else {
        return Ok(Vec::new());
    };
    slice.stream().clone_dtoh(slice).map_err(Error::wrap)
}
