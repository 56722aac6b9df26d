//! The kernels for x86: AVX2, and AVX-512 with VNNI.

mod avx2;
mod avx512;
pub mod lookup;
pub(super) mod ternary;

use super::activations::Q8Block;
use super::codes::{Codes, Unpacked};
use super::isa::Isa;
use super::kernel::{Kernels, Tile, Unpack, tile, unpack};
use super::layout::ROW_GROUP;
use super::scales::{Ready, Scales};
use crate::cpu::simd::Level;
use avx2::Avx2;
use avx512::Avx512;
use std::ops::Range;

/// The kernels for codes C with scales S; none for the scalar level.
pub(super) fn kernels<C: Codes + 'static, S: Scales + 'static>(
    level: Level,
) -> Option<&'static Kernels> {
    match level {
        Level::Scalar => None,
        Level::Avx2 => Some(
            const {
                &Kernels {
                    packed: &[
                        (4, avx2_by_halves::<C, S, 4> as Tile),
                        (2, avx2_by_halves::<C, S, 2>),
                        (1, avx2_at_once::<C, S>),
                    ],
                    unpacked: match C::BITS {
                        8 => None,
                        _ => Some((
                            avx2_unpack::<C, S> as Unpack,
                            &[
                                (4, avx2_by_halves::<Unpacked<C>, Ready, 4> as Tile),
                                (2, avx2_by_halves::<Unpacked<C>, Ready, 2>),
                                (1, avx2_by_halves::<Unpacked<C>, Ready, 1>),
                            ],
                        )),
                    },
                }
            },
        ),
        Level::Avx512 => Some(
            const {
                &Kernels {
                    packed: &[
                        (8, avx512::<C, S, 8> as Tile),
                        (4, avx512::<C, S, 4>),
                        (2, avx512::<C, S, 2>),
                        (1, avx512::<C, S, 1>),
                    ],
                    unpacked: match C::BITS {
                        8 => None,
                        _ => Some((
                            avx512_unpack::<C, S> as Unpack,
                            &[
                                (8, avx512::<Unpacked<C>, Ready, 8> as Tile),
                                (4, avx512::<Unpacked<C>, Ready, 4>),
                                (1, avx512::<Unpacked<C>, Ready, 1>),
                            ],
                        )),
                    },
                }
            },
        ),
    }
}

/// One token: both halves of the group in one pass, so that memory is read front to back.
///
/// # Safety
/// See [`Tile`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2_at_once<C: Codes, S: Scales>(
    weights: *const u8,
    blocks: usize,
    x: *const Q8Block,
    stride: usize,
    sums: *mut [f32; ROW_GROUP],
) {
    // SAFETY: the caller's.
    unsafe { tile::<Avx2, C, S, 1, 2>(weights, blocks, x, stride, 0, sums) }
}

/// Several tokens: each half of the group on its own, so that sums and codes fit the registers.
///
/// # Safety
/// See [`Tile`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2_by_halves<C: Codes, S: Scales, const T: usize>(
    weights: *const u8,
    blocks: usize,
    x: *const Q8Block,
    stride: usize,
    sums: *mut [f32; ROW_GROUP],
) {
    for lane in [0, Avx2::ROWS] {
        // SAFETY: the caller's.
        unsafe { tile::<Avx2, C, S, T, 1>(weights, blocks, x, stride, lane, sums) }
    }
}

/// # Safety
/// See [`Unpack`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2_unpack<C: Codes, S: Scales>(weights: *const u8, blocks: Range<usize>, out: *mut u8) {
    for lane in [0, Avx2::ROWS] {
        // SAFETY: the caller's.
        unsafe { unpack::<Avx2, C, S>(weights, blocks.clone(), lane, out) }
    }
}

/// # Safety
/// See [`Unpack`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn avx512_unpack<C: Codes, S: Scales>(
    weights: *const u8,
    blocks: Range<usize>,
    out: *mut u8,
) {
    // SAFETY: the caller's.
    unsafe { unpack::<Avx512, C, S>(weights, blocks, 0, out) }
}

/// # Safety
/// See [`Tile`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn avx512<C: Codes, S: Scales, const T: usize>(
    weights: *const u8,
    blocks: usize,
    x: *const Q8Block,
    stride: usize,
    sums: *mut [f32; ROW_GROUP],
) {
    // SAFETY: the caller's.
    unsafe { tile::<Avx512, C, S, T, 1>(weights, blocks, x, stride, 0, sums) }
}
