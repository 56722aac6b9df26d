//! INT8, FP8, NVFP4, NF4, INT4 and ternary codes in a GPU's memory: the host's side of `kernels/formats/packed.cuh`.

mod planes;

use super::abi::{
    FORMAT_THREADS, FP8_BLOCK, K_BLOCK, PackParams, PackedMatrix, ROW_GROUP, ROW_LANES,
    UnpackParams, WARP,
};
use super::words::WordsOnDevice;
use super::{
    Address, Grid, Launcher, Module, address, address_of, alloc, dtype_index, fatbin, upload_rows,
    zeros_before_launch,
};
use crate::pool;
use crate::quant::words::Words;
use crate::quant::{Codes, NVFP4_GROUP, Scheme};
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr};
use candle_core::{CudaDevice, CudaStorage, DType, Device, Error, Layout, Result, Tensor, bail};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

const OP: &str = "quant_linear";

static MODULE: Module = Module::new(
    "pack",
    fatbin!("pack"),
    &[
        "pack_int8",
        "pack_int4",
        "pack_ternary",
        "pack_fp8",
        "pack_nvfp4",
        "pack_nf4",
        "unpack_f32",
        "unpack_f16",
        "unpack_bf16",
        "unpack_tiles_f32",
        "unpack_tiles_f16",
        "unpack_tiles_bf16",
        "pack_find_nan_fp8",
    ],
);

/// The first `unpack` kernel.
const VALUES: usize = 6;
/// The first `unpack_tiles` kernel.
const TILES: usize = 9;
const FIND_NAN: usize = 12;

const _: () = assert!(FP8_BLOCK == crate::quant::FP8_BLOCK && K_BLOCK == FP8_BLOCK);

/// Scales of 16 values that a row of NVFP4 has in a K block, a byte each.
const NVFP4_SCALES: usize = K_BLOCK / NVFP4_GROUP;

/// Scales begin at a multiple of this many bytes.
const ALIGNMENT: usize = 256;

/// Bytes of plain codes on the device at a time.
const CHUNK: usize = 32 << 20;

/// Where a matrix of codes is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PackedAt {
    pub codes: Address,
    /// f32 for each row, or f16 for each group, which of NF4 are f32 too.
    pub scales: Address,
    /// 0 for none; of FP8 in blocks, not 0 if rows have scales of their own; of NVFP4 the scales of 16 values.
    pub zeros: Address,
    /// Scales of each 128 values of a row; 0 if a row has one.
    pub groups: usize,
}

/// Plain codes on the device, a byte each.
enum Plain {
    /// Freed in the order of the stream.
    Own(CudaSlice<i8>),
    /// Kept by somebody else.
    At(Address),
}

impl Plain {
    fn address(&self) -> Address {
        match self {
            Plain::Own(codes) => codes.device_ptr(codes.stream()).0,
            Plain::At(address) => *address,
        }
    }
}

/// How a scheme's matrix lies in memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct PackedLayout {
    scheme: Scheme,
    rows: usize,
    cols: usize,
    /// Groups of a step; 0 if a row has one scale.
    groups: usize,
    /// Of FP8 in blocks: whether rows have scales of their own, since there is a NaN among the codes.
    own_scales: bool,
}

impl PackedLayout {
    /// Of a matrix that kernels take.
    ///
    /// # Errors
    /// If the scheme has no such rows, the columns do not divide by 4, or the matrix is too large.
    pub fn new(scheme: Scheme, rows: usize, cols: usize) -> Result<Self> {
        scheme.check(cols)?;
        if !cols.is_multiple_of(4) {
            bail!("cols: {cols} is not a multiple of 4, as a GPU takes {scheme}");
        }
        let most = u32::MAX as usize;
        if rows == 0 || rows > most - ROW_GROUP || cols > most / 4 {
            bail!("rows: {rows} rows of {cols} values are past what the kernels take");
        }
        Ok(Self::of(scheme, rows, cols))
    }

    /// The same of a matrix that has been checked.
    pub fn of(scheme: Scheme, rows: usize, cols: usize) -> Self {
        Self {
            scheme,
            rows,
            cols,
            groups: match scheme.group() {
                Some(group) if scheme.has_f16_scales() || scheme == Scheme::Nf4 => K_BLOCK / group,
                _ => 0,
            },
            own_scales: false,
        }
    }

    /// The same for these codes.
    pub fn holding(self, codes: &Codes) -> Self {
        let blocks = self.scheme == Scheme::Fp8Block128;
        Self {
            own_scales: blocks && planes::has_nan(&codes.codes),
            ..self
        }
    }

    /// Rows and steps, those that fill up the last eight rows among them.
    fn places(&self) -> usize {
        self.rows.next_multiple_of(ROW_GROUP) * self.cols.div_ceil(K_BLOCK)
    }

    /// Threads that pack so many rows, and the bytes that each writes.
    fn packing(&self, rows: usize) -> (usize, usize) {
        let lanes = rows.next_multiple_of(ROW_GROUP) * self.cols.div_ceil(K_BLOCK) * ROW_LANES;
        match self.scheme {
            Scheme::Int8 => (rows * self.cols.div_ceil(16), 16),
            Scheme::Fp8 | Scheme::Fp8Block128 => (2 * lanes, 16),
            Scheme::Int4 { .. } | Scheme::Nvfp4 | Scheme::Nf4 => (lanes, 16),
            Scheme::Ternary { .. } => (lanes, 8),
        }
    }

    fn code_bytes(&self) -> usize {
        let (threads, bytes) = self.packing(self.rows);
        threads * bytes
    }

    fn scales_at(&self) -> usize {
        self.code_bytes().next_multiple_of(ALIGNMENT)
    }

    fn zeros_at(&self) -> usize {
        self.scales_at()
            + match self.groups {
                0 if self.own_scales => 4 * self.rows * self.cols.div_ceil(K_BLOCK),
                0 if self.scheme == Scheme::Fp8Block128 => {
                    4 * self.scheme.scale_count(self.rows, self.cols)
                }
                0 if self.scheme == Scheme::Nvfp4 => (4 * self.rows).next_multiple_of(ALIGNMENT),
                0 => 4 * self.rows,
                groups if self.scheme == Scheme::Nf4 => 4 * groups * self.places(),
                groups => 2 * groups * self.places(),
            }
    }

    /// Whether kernels are given an address behind the scales: of zero points, of scales of 16 values, or as a sign.
    fn has_second_plane(&self) -> bool {
        self.scheme.has_zeros() || self.scheme == Scheme::Nvfp4 || self.own_scales
    }

    /// Bytes in all.
    pub fn bytes(&self) -> usize {
        let zeros = match self.scheme {
            Scheme::Nvfp4 => NVFP4_SCALES * self.places(),
            _ if self.scheme.has_zeros() => self.groups * self.places(),
            _ => 0,
        };
        self.zeros_at() + zeros
    }

    /// Where everything is in memory that begins at `start`.
    pub fn at(&self, start: Address) -> PackedAt {
        PackedAt {
            codes: start,
            scales: start + self.scales_at() as Address,
            zeros: match self.has_second_plane() {
                true => start + self.zeros_at() as Address,
                false => 0,
            },
            groups: self.groups,
        }
    }

    /// Uploads and packs the codes.
    ///
    /// # Errors
    /// If the codes are not those of such a matrix, or the device's memory does not suffice.
    pub fn upload(&self, codes: &Codes, device: &CudaDevice) -> Result<CudaStorage> {
        codes.check()?;
        let read = |first: usize, rows: &mut [i8]| {
            rows.copy_from_slice(&codes.codes[first * self.cols..][..rows.len()]);
        };
        self.upload_rows(codes, read, device)
    }

    /// Uploads and packs codes that `read` writes row by row, from a first row on.
    ///
    /// # Errors
    /// As [`Self::upload`].
    pub fn upload_rows(
        &self,
        codes: &Codes,
        read: impl Fn(usize, &mut [i8]) + Sync,
        device: &CudaDevice,
    ) -> Result<CudaStorage> {
        codes.check_scales()?;
        let (low, high) = self.scheme.code_range();
        let unknown = AtomicBool::new(false);
        let data = self.pack(codes, device, |first, rows| {
            // SAFETY: any bits are an i8, and all are written below.
            let plain = Plain::Own(unsafe { device.alloc::<i8>(rows * self.cols)? });
            let fill = |row: usize, out: &mut [u8]| {
                let row = first + row;
                let out = as_codes(out);
                read(row, out);
                planes::zero_where_scales_are(codes, row, out);
                let known = |all, q: &i8| all & (low <= *q) & (*q <= high);
                if !out.iter().fold(true, known) {
                    unknown.store(true, Relaxed);
                }
                Ok(())
            };
            // SAFETY: the allocation has room for so many codes.
            unsafe { upload_rows(plain.address(), (rows, self.cols), device, fill)? };
            Ok(plain)
        })?;
        match unknown.into_inner() {
            true => bail!(
                "codes: one is not in {low} to {high}, as those of {} are",
                self.scheme
            ),
            false => Ok(data),
        }
    }

    /// Packs codes that are on the device already, a byte each from `plain` on: `codes` has none.
    ///
    /// # Safety
    /// There are `[rows, cols]` codes of the scheme until the device's stream has passed this. Those of NVFP4 are 0 where
    /// their e4m3 scale is.
    ///
    /// # Errors
    /// If the scales are not those of such a matrix, or the device's memory does not suffice.
    pub unsafe fn pack_on_device(
        &self,
        codes: &Codes,
        plain: Address,
        device: &CudaDevice,
    ) -> Result<CudaStorage> {
        codes.check_scales()?;
        self.pack(codes, device, |first, _| {
            Ok(Plain::At(plain + (first * self.cols) as Address))
        })
    }

    /// The same of codes that are still in words: `codes` has none.
    ///
    /// # Errors
    /// Likewise, or if a code has no word, or no column of its own in `order`.
    pub fn upload_words(
        &self,
        codes: &Codes,
        (words, order): (&Words, Option<&[u32]>),
        device: &CudaDevice,
    ) -> Result<CudaStorage> {
        codes.check_scales()?;
        if let Scheme::Ternary { .. } = self.scheme {
            bail!("codes: {} in words, expected 4 or 8 bits", self.scheme);
        }
        if !pool::all(&codes.group_scales, |b| *b != 0) {
            bail!("group_scales: 0, expected others where codes are in words");
        }
        let words = WordsOnDevice::new(words, order, (self.rows, self.cols), device)?;
        self.pack(codes, device, |first, rows| {
            words.unpack(first, rows).map(Plain::Own)
        })
    }

    /// Packs plain codes, which `plain` gives on the device for a first row and a number of rows, and uploads scales.
    fn pack(
        &self,
        codes: &Codes,
        device: &CudaDevice,
        plain: impl Fn(usize, usize) -> Result<Plain>,
    ) -> Result<CudaStorage> {
        let data = alloc(OP, device, DType::U8, self.bytes())?;
        let start = address(&data, &Layout::contiguous(self.bytes()))?;
        let launcher = Launcher::new(device)?;
        let rows_of_chunk = (CHUNK / self.cols).max(1).next_multiple_of(ROW_GROUP);
        let mut out = start;
        for first in (0..self.rows).step_by(rows_of_chunk) {
            let rows = rows_of_chunk.min(self.rows - first);
            let plain = plain(first, rows)?;
            let from = plain.address();
            let (threads, bytes) = self.packing(rows);
            let params = PackParams {
                codes: from,
                out,
                rows: rows as u64,
                k: self.cols as u32,
            };
            let kernel = match self.scheme {
                Scheme::Int8 => 0,
                Scheme::Int4 { .. } => 1,
                Scheme::Ternary { .. } => 2,
                Scheme::Fp8 | Scheme::Fp8Block128 => 3,
                Scheme::Nvfp4 => 4,
                Scheme::Nf4 => 5,
            };
            // SAFETY: the kernel takes `PackParams` and writes the rows' part of the codes; the
            // plain codes are freed in the order of the stream.
            unsafe { launcher.run(&MODULE, kernel, line(threads)?, &params)? };
            out += (threads * bytes) as Address;
        }
        let put = |plane: planes::Plane, at: usize| {
            // SAFETY: the plane lies within the allocation, which is used and freed on this stream.
            unsafe { plane.upload(start + at as Address, device) }
        };
        put(self.scales(codes), self.scales_at())?;
        put(self.zeros(codes), self.zeros_at())?;
        Ok(data)
    }
}

/// Bytes as codes, which are signed.
fn as_codes(bytes: &mut [u8]) -> &mut [i8] {
    // SAFETY: both types have one byte, of any bits.
    unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), bytes.len()) }
}

/// Whether a NaN is among e4m3 floats on a GPU, which is waited for.
///
/// # Errors
/// If the tensor is not on a CUDA device, or the driver fails.
pub(crate) fn holds_nan(floats: &Tensor) -> Result<bool> {
    let count = floats.elem_count();
    let Device::Cuda(device) = floats.device() else {
        bail!("find_nan: expected a tensor on a CUDA device");
    };
    let launcher = Launcher::new(device)?;
    let found = zeros_before_launch(&launcher, device, 1)?;
    let params = PackParams {
        codes: address_of(floats)?,
        out: found.device_ptr(found.stream()).0,
        rows: count as u64,
        k: 1,
    };
    // SAFETY: the kernel takes `PackParams`, reads the floats and writes one word.
    unsafe { launcher.run(&MODULE, FIND_NAN, line(count.div_ceil(16))?, &params)? };
    Ok(device.clone_dtoh(&found)? != [0])
}

/// The binary logarithm of the groups of a K block.
pub(crate) fn groups_log2(group: usize) -> usize {
    (K_BLOCK / group).next_power_of_two().ilog2() as usize
}

/// A scheme's format as `PackedFormat` of the kernels numbers it.
pub(super) fn index(scheme: Scheme) -> usize {
    match (scheme, scheme.group()) {
        (Scheme::Int8, _) => 0,
        (Scheme::Fp8, _) => 8,
        (Scheme::Fp8Block128, _) => 9,
        (Scheme::Nvfp4, _) => 10,
        (Scheme::Nf4, _) => 11,
        (Scheme::Int4 { .. }, group) => 1 + group.map_or(0, groups_log2),
        (Scheme::Ternary { .. }, None) => 4,
        (Scheme::Ternary { .. }, Some(group)) => 5 + groups_log2(group),
    }
}

/// Whether a format's codes lie in tiles, as `HAS_TILES` of the kernels says.
fn has_tiles(format: usize) -> bool {
    [Scheme::Int8, Scheme::Fp8, Scheme::Fp8Block128]
        .iter()
        .all(|scheme| index(*scheme) != format)
}

/// Values of a matrix: all of its rows, or those that ids name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ValuesOf {
    pub matrix: PackedAt,
    /// The format as the kernels number it.
    pub format: usize,
    pub rows: usize,
    pub cols: usize,
    /// `[count]` of u32, or 0 for all rows.
    pub ids: Address,
    pub count: usize,
    /// `[count, cols]`.
    pub out: Address,
    pub dtype: DType,
}

/// Launches the conversion. An id that is not below the matrix's rows gives a row of NaN.
///
/// # Safety
/// Each address holds what its field says, until the stream has passed this; `out` is aligned to 16
/// bytes.
pub(crate) unsafe fn values(launcher: &Launcher, at: &ValuesOf) -> Result<()> {
    let params = UnpackParams {
        matrix: PackedMatrix {
            codes: at.matrix.codes,
            scales: at.matrix.scales,
            zeros: at.matrix.zeros,
        },
        ids: at.ids,
        out: at.out,
        count: at.count as u64,
        rows: u32::try_from(at.rows).map_err(Error::wrap)?,
        k: u32::try_from(at.cols).map_err(Error::wrap)?,
        format: at.format as i32,
    };
    let (first, grid) = match at.ids == 0 && has_tiles(at.format) {
        // A warp for each tile.
        true => {
            debug_assert_eq!(at.count, at.rows, "without ids all rows are wanted");
            let tiles = at.rows.div_ceil(ROW_GROUP) * at.cols.div_ceil(K_BLOCK);
            (TILES, line(tiles * WARP)?)
        }
        // Eight values for a thread.
        false => (VALUES, line(at.count * at.cols.div_ceil(8))?),
    };
    let bytes = at.count * at.cols * (1 + at.dtype.size_in_bytes());
    // SAFETY: the kernel takes `UnpackParams`; the rest is the caller's.
    unsafe {
        launcher
            .moving(bytes as u64)
            .run(&MODULE, first + dtype_index(at.dtype), grid, &params)
    }
}

/// Blocks along x for `threads` threads, whose numbers kernels have in 32 bits.
pub(super) fn line(threads: usize) -> Result<Grid> {
    match u32::try_from(threads.next_multiple_of(FORMAT_THREADS)) {
        Ok(threads) => Ok(Grid::line(
            threads / FORMAT_THREADS as u32,
            FORMAT_THREADS as u32,
        )),
        Err(_) => bail!("{OP}: {threads} threads are past what a launch has"),
    }
}
