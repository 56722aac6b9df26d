//! The scales and zero points of codes in the order in which kernels read them.

use super::{K_BLOCK, NVFP4_SCALES, PackedLayout, ROW_GROUP};
use crate::cuda::abi::FP8_BLOCK;
use crate::cuda::{Address, upload};
use crate::pool;
use crate::quant::{Codes, NVFP4_GROUP, Scheme, e4m3};
use candle_core::{CudaDevice, Result};
use half::f16;

/// What lies behind the codes.
pub(super) enum Plane {
    Floats(Vec<f32>),
    Halves(Vec<f16>),
    Bytes(Vec<u8>),
}

impl Plane {
    /// Copies it to the device.
    ///
    /// # Safety
    /// There is room from `to` on until the device's stream has passed this.
    pub unsafe fn upload(&self, to: Address, device: &CudaDevice) -> Result<()> {
        fn bytes<T: Copy>(plane: &[T]) -> &[u8] {
            // SAFETY: the planes' types are numbers, all of whose bytes are initialised.
            unsafe { std::slice::from_raw_parts(plane.as_ptr().cast(), size_of_val(plane)) }
        }
        let bytes = match self {
            Plane::Floats(plane) => bytes(plane),
            Plane::Halves(plane) => bytes(plane),
            Plane::Bytes(plane) => plane,
        };
        // SAFETY: the caller's.
        unsafe { upload(to, bytes, device) }
    }
}

impl PackedLayout {
    /// The plane of scales.
    pub(super) fn scales(&self, codes: &Codes) -> Plane {
        if self.scheme.is_fp8() {
            return Plane::Floats(self.fp8_scales(codes));
        }
        if self.groups == 0 {
            let of_row = |row: usize| codes.scales[row % codes.scales.len()];
            return Plane::Floats((0..self.rows).map(of_row).collect());
        }
        if self.scheme == Scheme::Nf4 {
            return Plane::Floats(self.by_place(&codes.scales, |scale| *scale));
        }
        let half = |scale: &f32| f16::from_f32(*scale);
        Plane::Halves(self.by_place(&codes.scales, half))
    }

    /// FP8's: of rows, of blocks, or of rows and blocks, whose sign says that a NaN is among their codes. Codes that are
    /// not here have none.
    fn fp8_scales(&self, codes: &Codes) -> Vec<f32> {
        let blocks = self.scheme == Scheme::Fp8Block128;
        let (width, step) = match (blocks, self.own_scales) {
            (true, false) => (K_BLOCK, FP8_BLOCK),
            (true, true) => (K_BLOCK, 1),
            (false, _) => (codes.cols, 1),
        };
        let across = codes.cols.div_ceil(width);
        let mut scales = vec![0.; codes.rows.div_ceil(step) * across];
        pool::for_rows(&mut scales, across, 1, |first, part| {
            for (row, scales) in (first..).zip(part.chunks_exact_mut(across)) {
                let row = row * step;
                let of_row = codes.codes.get(row * codes.cols..).unwrap_or_default();
                for (at, scale) in scales.iter_mut().enumerate() {
                    let (value, _) = codes.meaning(row, at * width);
                    let end = codes.cols.min((at + 1) * width);
                    // Of a block without scales of rows, no code is one.
                    let some = of_row.get(at * width..end).unwrap_or_default();
                    *scale = if step == 1 && is_any_nan(some) {
                        -value
                    } else {
                        value
                    };
                }
            }
        });
        scales
    }

    /// The plane of zero points, or of NVFP4's scales of 16 values.
    pub(super) fn zeros(&self, codes: &Codes) -> Plane {
        Plane::Bytes(match self.scheme {
            Scheme::Nvfp4 => self.nvfp4_scales(codes),
            _ if self.scheme.has_zeros() => self.by_place(&codes.zeros, |zero| *zero),
            _ => Vec::new(),
        })
    }

    /// Of each row and K block those of the first halves of its four blocks, then of the second.
    fn nvfp4_scales(&self, codes: &Codes) -> Vec<u8> {
        let (k_blocks, across) = (self.cols.div_ceil(K_BLOCK), self.cols / NVFP4_GROUP);
        let stored: [u8; 256] = std::array::from_fn(|b| without_subnormals(b as u8));
        let mut plane = vec![0; NVFP4_SCALES * self.places()];
        let of_group = k_blocks * ROW_GROUP * NVFP4_SCALES;
        pool::for_rows(&mut plane, of_group, 1, |first, part| {
            for (row_group, plane) in (first..).zip(part.chunks_exact_mut(of_group)) {
                for within in 0..ROW_GROUP.min(self.rows - row_group * ROW_GROUP) {
                    let row = row_group * ROW_GROUP + within;
                    let scales = &codes.group_scales[row * across..][..across];
                    for (k_block, scales) in scales.chunks(NVFP4_SCALES).enumerate() {
                        let place = (k_block * ROW_GROUP + within) * NVFP4_SCALES;
                        for (at, b) in scales.iter().enumerate() {
                            let to = at % 2 * (NVFP4_SCALES / 2) + at / 2;
                            plane[place + to] = stored[usize::from(*b)];
                        }
                    }
                }
            }
        });
        plane
    }

    /// What groups have, in the order of the kernels, with zeros for those that the matrix has not.
    fn by_place<T: Sync, U: Send + Clone + Default>(
        &self,
        of: &[T],
        stored: impl Fn(&T) -> U + Sync,
    ) -> Vec<U> {
        let (k_blocks, groups) = (self.cols.div_ceil(K_BLOCK), self.groups);
        let count = self.cols / (K_BLOCK / groups);
        let mut plane = vec![U::default(); self.places() * groups];
        let of_group = k_blocks * ROW_GROUP * groups;
        pool::for_rows(&mut plane, of_group, 1, |first, part| {
            for (row_group, plane) in (first..).zip(part.chunks_exact_mut(of_group)) {
                for within in 0..ROW_GROUP.min(self.rows - row_group * ROW_GROUP) {
                    let row = row_group * ROW_GROUP + within;
                    let values = &of[row * count..][..count];
                    for (k_block, values) in values.chunks(groups).enumerate() {
                        let place = (k_block * ROW_GROUP + within) * groups;
                        for (to, value) in plane[place..].iter_mut().zip(values) {
                            *to = stored(value);
                        }
                    }
                }
            }
        });
        plane
    }
}

/// An e4m3 number of positive sign with 5 bits of exponent, none of them special: 2^(e - 10) (1 + m / 8); 0 for 0.
fn without_subnormals(b: u8) -> u8 {
    /// Of f32, where e is 0.
    const BIAS: u32 = 127 - 10;
    let bits = e4m3::to_f32(b).to_bits();
    (bits >> 20).saturating_sub(BIAS << 3) as u8
}

/// Whether a NaN is among some e4m3 floats.
fn is_any_nan(codes: &[i8]) -> bool {
    codes
        .iter()
        .fold(false, |any, code| any | e4m3::is_nan(*code as u8))
}

/// The same of many.
pub(super) fn has_nan(codes: &[i8]) -> bool {
    !pool::all(codes, |code| !e4m3::is_nan(*code as u8))
}

/// Puts zeros into rows from `row` on where a scale of NVFP4 is zero, since the kernels' scales are not.
pub(super) fn zero_where_scales_are(codes: &Codes, row: usize, rows: &mut [i8]) {
    if codes.group_scales.is_empty() {
        return;
    }
    let scales = &codes.group_scales[row * (codes.cols / NVFP4_GROUP)..];
    for (b, group) in scales.iter().zip(rows.chunks_exact_mut(NVFP4_GROUP)) {
        if *b == 0 {
            group.fill(0);
        }
    }
}
