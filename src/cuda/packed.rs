//! INT8, FP8, NVFP4, NF4, INT4 and ternary codes in a GPU's memory: the host's side of `kernels/formats/packed.cuh`.

use super::abi::{
    FORMAT_THREADS, FP8_BLOCK, K_BLOCK, PackParams, PackedMatrix, ROW_GROUP, ROW_LANES,
    UnpackParams, WARP,
};
use super::words::WordsOnDevice;
use super::{Address, Grid, Launcher, Module, address, alloc, dtype_index, fatbin};
use crate::quant::words::Words;
use crate::quant::{Codes, NVFP4_GROUP, Scheme, e4m3};
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, result};
use candle_core::{CudaDevice, CudaStorage, DType, Error, Layout, Result, bail};
use half::f16;
use std::borrow::Cow;

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
    ],
);

/// The first `unpack` kernel.
const VALUES: usize = 6;
/// The first `unpack_tiles` kernel.
const TILES: usize = 9;

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

/// Where plain codes are on the device, a byte each, and what is freed with them in the order of the stream.
type Plain = (Address, Option<CudaSlice<i8>>);

fn uploaded(codes: CudaSlice<i8>) -> Plain {
    let at = codes.device_ptr(codes.stream()).0;
    (at, Some(codes))
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
        let is_nan = |code: &i8| e4m3::is_nan(*code as u8);
        let blocks = self.scheme == Scheme::Fp8Block128;
        Self {
            own_scales: blocks && codes.codes.iter().any(is_nan),
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
        let plain = zeroed_where_scales_are(codes);
        self.pack(codes, device, |first, rows| {
            let chunk = &plain[first * self.cols..][..rows * self.cols];
            device.clone_htod(chunk).map(uploaded)
        })
    }

    /// The same of codes that are on the device, `[rows, cols]` at `plain`: `codes` has none. Those of NVFP4 are 0 where their
    /// e4m3 scale is.
    ///
    /// # Errors
    /// If the scales are not those of such a matrix, or the device's memory does not suffice.
    pub fn pack_on_device(
        &self,
        codes: &Codes,
        plain: Address,
        device: &CudaDevice,
    ) -> Result<CudaStorage> {
        codes.check_scales()?;
        self.pack(codes, device, |first, _| {
            Ok((plain + (first * self.cols) as Address, None))
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
        if !matches!(self.scheme, Scheme::Int8 | Scheme::Int4 { .. }) {
            bail!("codes: {} in words, expected INT8 or INT4", self.scheme);
        }
        let words = WordsOnDevice::new(words, order, (self.rows, self.cols), device)?;
        self.pack(codes, device, |first, rows| {
            words.unpack(first, rows).map(uploaded)
        })
    }

    /// Packs plain codes, which `plain` gives on the device for a first row and a number of rows, and uploads scales.
    fn pack(
        &self,
        codes: &Codes,
        device: &CudaDevice,
        plain: impl Fn(usize, usize) -> Result<Plain>,
    ) -> Result<CudaStorage> {
        let (scales, zeros) = (self.scales(codes), self.zeros(codes));
        let data = alloc(OP, device, DType::U8, self.bytes())?;
        let start = address(&data, &Layout::contiguous(self.bytes()))?;
        let launcher = Launcher::new(device)?;
        let rows_of_chunk = (CHUNK / self.cols).max(1).next_multiple_of(ROW_GROUP);
        let mut out = start;
        for first in (0..self.rows).step_by(rows_of_chunk) {
            let rows = rows_of_chunk.min(self.rows - first);
            let (from, _owned) = plain(first, rows)?;
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
        let parts = [(scales, self.scales_at()), (zeros, self.zeros_at())];
        for (bytes, at) in parts.iter().filter(|(bytes, _)| !bytes.is_empty()) {
            // SAFETY: the plane lies within the allocation, which is used and freed on this stream; the
            // driver has read pageable memory when the call returns.
            unsafe { result::memcpy_htod_async(start + *at as Address, bytes, launcher.stream) }
                .map_err(Error::wrap)?;
        }
        Ok(data)
    }

    /// The plane of scales.
    fn scales(&self, codes: &Codes) -> Vec<u8> {
        if self.scheme.is_fp8() && codes.codes.is_empty() {
            return codes.scales.iter().flat_map(|s| s.to_le_bytes()).collect();
        }
        if self.scheme.is_fp8() {
            return self.fp8_scales(codes).flat_map(f32::to_le_bytes).collect();
        }
        if self.groups == 0 {
            let of_row = |row: usize| codes.scales[row % codes.scales.len()];
            return (0..self.rows)
                .flat_map(|row| of_row(row).to_le_bytes())
                .collect();
        }
        if self.scheme == Scheme::Nf4 {
            let scales = self.by_place(&codes.scales, 0.);
            return scales.flat_map(f32::to_le_bytes).collect();
        }
        let halves: Vec<_> = codes.scales.iter().map(|s| f16::from_f32(*s)).collect();
        self.by_place(&halves, f16::ZERO)
            .flat_map(f16::to_le_bytes)
            .collect()
    }

    /// FP8's: of rows, of blocks, or of rows and blocks, whose sign says that a NaN is among their codes.
    fn fp8_scales(&self, codes: &Codes) -> impl Iterator<Item = f32> {
        let blocks = self.scheme == Scheme::Fp8Block128;
        let width = if blocks { K_BLOCK } else { codes.cols };
        let step = if blocks && !self.own_scales {
            FP8_BLOCK
        } else {
            1
        };
        let row = move |row: usize| {
            let of_row = codes.codes[row * codes.cols..][..codes.cols].chunks(width);
            of_row.enumerate().map(move |(at, of_scale)| {
                let (scale, _) = codes.meaning(row, at * width);
                let has_nan = of_scale.iter().any(|code| e4m3::is_nan(*code as u8));
                if has_nan { -scale } else { scale }
            })
        };
        (0..codes.rows).step_by(step).flat_map(row)
    }

    /// The plane of zero points, or of NVFP4's scales of 16 values.
    fn zeros(&self, codes: &Codes) -> Vec<u8> {
        match self.scheme {
            Scheme::Nvfp4 => self.nvfp4_scales(codes),
            _ if self.scheme.has_zeros() => self.by_place(&codes.zeros, 0).collect(),
            _ => Vec::new(),
        }
    }

    /// Of each row and K block those of the first halves of its four blocks, then of the second.
    fn nvfp4_scales(&self, codes: &Codes) -> Vec<u8> {
        let (k_blocks, across) = (self.cols.div_ceil(K_BLOCK), self.cols / NVFP4_GROUP);
        let mut plane = vec![0; NVFP4_SCALES * self.places()];
        for (row, scales) in codes.group_scales.chunks_exact(across).enumerate() {
            for (group, b) in scales.iter().enumerate() {
                let (k_block, within) = (group / NVFP4_SCALES, group % NVFP4_SCALES);
                let place = (row / ROW_GROUP * k_blocks + k_block) * ROW_GROUP + row % ROW_GROUP;
                let at = within % 2 * (NVFP4_SCALES / 2) + within / 2;
                plane[place * NVFP4_SCALES + at] = without_subnormals(*b);
            }
        }
        plane
    }

    /// What groups have, in the order of the kernels.
    fn by_place<'a, T: Copy>(&'a self, of: &'a [T], absent: T) -> impl Iterator<Item = T> + 'a {
        let (k_blocks, group) = (self.cols.div_ceil(K_BLOCK), K_BLOCK / self.groups);
        let count = self.cols / group;
        (0..self.rows.div_ceil(ROW_GROUP)).flat_map(move |row_group| {
            (0..k_blocks).flat_map(move |k_block| {
                (0..ROW_GROUP * self.groups).map(move |i| {
                    let row = row_group * ROW_GROUP + i / self.groups;
                    let value = k_block * K_BLOCK + i % self.groups * group;
                    if row < self.rows && value < self.cols {
                        of[row * count + value / group]
                    } else {
                        absent
                    }
                })
            })
        })
    }
}

/// An e4m3 number of positive sign with 5 bits of exponent, none of them special: 2^(e - 10) (1 + m / 8); 0 for 0.
fn without_subnormals(b: u8) -> u8 {
    /// Of f32, where e is 0.
    const BIAS: u32 = 127 - 10;
    let bits = e4m3::to_f32(b).to_bits();
    (bits >> 20).saturating_sub(BIAS << 3) as u8
}

/// The codes, with zeros where a scale of NVFP4 is zero, since the kernels' scales are not.
fn zeroed_where_scales_are(codes: &Codes) -> Cow<'_, [i8]> {
    let groups = codes.codes.chunks_exact(NVFP4_GROUP);
    let hidden = |(b, group): (&u8, &[i8])| *b == 0 && group.iter().any(|q| *q != 0);
    if !codes.group_scales.iter().zip(groups).any(hidden) {
        return Cow::Borrowed(&codes.codes);
    }
    let mut all = codes.codes.clone();
    for (b, group) in codes
        .group_scales
        .iter()
        .zip(all.chunks_exact_mut(NVFP4_GROUP))
    {
        if *b == 0 {
            group.fill(0);
        }
    }
    Cow::Owned(all)
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
