//! The 16-row kernels in plain Rust, so that what AVX-512 adds to the shared code (16 lanes, codes of
//! 8 bits with an offset, parts summed at once) is tested on any processor.

use super::activations::Q8Activations;
use super::codes::*;
use super::floats;
use super::kernel::{Codes, Isa, Scales, UNPACKED_BLOCKS, UNPACKED_BYTES, tile, unpack};
use super::layout::ROW_GROUP;
use super::matrix::PackedMatrix;
use super::q8::{FINER, Grain, Q8Block};
use super::scales::*;
use super::scheme_tests::schemes;
use super::tests::{normals, quantized};
use crate::cpu::simd::Level;
use crate::quant::e4m3::{UNBIAS, to_f32};
use crate::quant::{BlockFormat, Scheme, quantize};
use candle_core::quantized::GgmlDType;
use half::f16;
use rand::{SeedableRng, rngs::StdRng};
use std::array::from_fn;

#[derive(Clone, Copy)]
struct Wide;

/// # Safety
/// N readable bytes at `p`.
unsafe fn read<const N: usize>(p: *const u8) -> [u8; N] {
    // SAFETY: the caller's.
    unsafe { p.cast::<[u8; N]>().read() }
}

fn shift(a: [u8; 64], f: impl Fn(u16) -> u16) -> [u8; 64] {
    let lane = |i: usize| f(u16::from_le_bytes([a[i & !1], a[i | 1]])).to_le_bytes();
    from_fn(|i| lane(i)[i & 1])
}

impl Isa for Wide {
    type Bytes = [u8; 64];
    type Floats = [f32; 16];

    const ROWS: usize = 16;
    const EIGHT_BIT_ZERO: i32 = 128;

    unsafe fn load(p: *const u8) -> [u8; 64] {
        // SAFETY: by the trait's contract.
        unsafe { read(p) }
    }
    unsafe fn splat(byte: u8) -> [u8; 64] {
        [byte; 64]
    }
    unsafe fn and(a: [u8; 64], b: [u8; 64]) -> [u8; 64] {
        from_fn(|i| a[i] & b[i])
    }
    unsafe fn or(a: [u8; 64], b: [u8; 64]) -> [u8; 64] {
        from_fn(|i| a[i] | b[i])
    }
    unsafe fn double(a: [u8; 64]) -> [u8; 64] {
        a.map(|a| a.wrapping_add(a))
    }
    unsafe fn shl2(a: [u8; 64]) -> [u8; 64] {
        shift(a, |a| a << 2)
    }
    unsafe fn shr1(a: [u8; 64]) -> [u8; 64] {
        shift(a, |a| a >> 1)
    }
    unsafe fn shr2(a: [u8; 64]) -> [u8; 64] {
        shift(a, |a| a >> 2)
    }
    unsafe fn shr4(a: [u8; 64]) -> [u8; 64] {
        shift(a, |a| a >> 4)
    }
    unsafe fn eight_bits(a: [u8; 64]) -> [u8; 64] {
        a.map(|a| a ^ 0x80)
    }
    unsafe fn look_up(table: &[u8; 16], nibbles: [u8; 64]) -> [u8; 64] {
        nibbles.map(|nibble| table[usize::from(nibble)])
    }
    unsafe fn look_up_f32(table: &[f32; 16], a: [u8; 64], byte: usize) -> [f32; 16] {
        from_fn(|i| table[usize::from(a[4 * i + byte] & 15)])
    }
    unsafe fn quads(p: *const u8) -> [u8; 64] {
        // SAFETY: by the trait's contract.
        let runs = unsafe { read::<64>(p) };
        from_fn(|i| runs[16 * (i % 4) + i / 4])
    }
    unsafe fn zero() -> [f32; 16] {
        [0.0; 16]
    }
    unsafe fn set(x: f32) -> [f32; 16] {
        [x; 16]
    }
    unsafe fn load_f16(p: *const u8) -> [f32; 16] {
        // SAFETY: by the trait's contract.
        let bytes = unsafe { read::<32>(p) };
        from_fn(|i| f16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]).to_f32())
    }
    unsafe fn load_u8(p: *const u8) -> [f32; 16] {
        // SAFETY: by the trait's contract.
        unsafe { read::<16>(p) }.map(f32::from)
    }
    unsafe fn load_nibbles(p: *const u8) -> [[f32; 16]; 2] {
        // SAFETY: by the trait's contract.
        let bytes = unsafe { read::<16>(p) };
        [bytes.map(|b| b & 15), bytes.map(|b| b >> 4)].map(|nibbles| nibbles.map(f32::from))
    }
    unsafe fn load_i8(p: *const u8) -> [f32; 16] {
        // SAFETY: by the trait's contract.
        unsafe { read::<16>(p) }.map(|b| f32::from(b as i8))
    }
    unsafe fn load_e4m3(p: *const u8) -> [f32; 16] {
        // SAFETY: by the trait's contract.
        unsafe { read::<16>(p) }.map(|b| to_f32(b) / 256.)
    }
    unsafe fn mul(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        from_fn(|i| a[i] * b[i])
    }
    unsafe fn fma(a: [f32; 16], b: [f32; 16], c: [f32; 16]) -> [f32; 16] {
        from_fn(|i| a[i].mul_add(b[i], c[i]))
    }
    unsafe fn load_f32(p: *const u8) -> [f32; 16] {
        // SAFETY: by the trait's contract.
        unsafe { p.cast::<[f32; 16]>().read_unaligned() }
    }
    unsafe fn nan_if_negative(a: [f32; 16]) -> [f32; 16] {
        a.map(|a| if a.is_sign_negative() { f32::NAN } else { a })
    }
    unsafe fn e4m3(a: [u8; 64], byte: usize) -> [f32; 16] {
        from_fn(|i| match a[4 * i + byte] {
            code if code & 0x7f == 0x7f => 480. / UNBIAS * if code < 0x80 { 1. } else { -1. },
            code => to_f32(code) / UNBIAS,
        })
    }
    unsafe fn store_bytes(p: *mut u8, a: [u8; 64]) {
        // SAFETY: by the trait's contract.
        unsafe { p.cast::<[u8; 64]>().write(a) }
    }
    unsafe fn store(p: *mut f32, a: [f32; 16]) {
        // SAFETY: by the trait's contract.
        unsafe { p.cast::<[f32; 16]>().write(a) }
    }

    unsafe fn accumulate<C: Codes, const T: usize, const P: usize>(
        sums: &mut [[f32; 16]; T],
        scale: [f32; 16],
        planes: *const u8,
        part: usize,
        x: [[*const Q8Block; P]; T],
    ) {
        // SAFETY: by the trait's contract.
        unsafe {
            if C::FLOATS {
                return floats::accumulate::<Self, C, T, P>(sums, scale, planes, x);
            }
            let mut codes = C::open::<Self>(planes, part);
            let mut dots = [[0i32; 16]; T];
            for i in 0..C::VECTORS {
                let (w, k) = codes.next(i);
                for (dots, x) in dots.iter_mut().zip(x) {
                    for (b, w) in w.into_iter().enumerate() {
                        let q = x.map(|x| i32::from((*x).q[k + b % 4]));
                        let q = q.into_iter().fold(0, |coarse, q| FINER * coarse + q);
                        dots[b / 4] += i32::from(w) * q;
                    }
                }
            }
            for ((sums, dots), x) in sums.iter_mut().zip(dots).zip(x) {
                *sums = Self::fma(
                    Self::mul(dots.map(|d| d as f32), scale),
                    [(*x[P - 1]).d; 16],
                    *sums,
                );
            }
        }
    }
}

/// Three tokens times the first row group, packed and (but for 8 bits and floats) unpacked.
fn products<C: Codes, S: Scales>(
    matrix: &PackedMatrix,
    x: &Q8Activations,
) -> Vec<[[f32; ROW_GROUP]; 3]> {
    match x.grain().fine {
        false => products_of_parts::<C, S, 1>(matrix, x),
        true => products_of_parts::<C, S, 2>(matrix, x),
    }
}

fn products_of_parts<C: Codes, S: Scales, const P: usize>(
    matrix: &PackedMatrix,
    x: &Q8Activations,
) -> Vec<[[f32; ROW_GROUP]; 3]> {
    let mut room = Vec::new();
    let (blocks, group) = (matrix.blocks(), matrix.group(0, &mut room));
    let (x, stride) = (x.blocks().as_ptr(), P * blocks);
    let mut packed = [[0.0; ROW_GROUP]; 3];
    // SAFETY: the group has those blocks, and x three tokens of them.
    unsafe {
        tile::<Wide, C, S, 3, P, 1>(group.as_ptr(), blocks, x, stride, 0, packed.as_mut_ptr())
    };
    if C::BITS == 8 || C::FLOATS {
        return vec![packed];
    }
    let mut unpacked = [[0.0; ROW_GROUP]; 3];
    let mut bytes = vec![0u8; UNPACKED_BYTES];
    for first in (0..blocks).step_by(UNPACKED_BLOCKS) {
        let some = UNPACKED_BLOCKS.min(blocks - first);
        // SAFETY: as above; `bytes` has room for `some` blocks.
        unsafe {
            unpack::<Wide, C, S>(group.as_ptr(), first..first + some, 0, bytes.as_mut_ptr());
            let (bytes, sums) = (bytes.as_ptr(), unpacked.as_mut_ptr());
            tile::<Wide, Unpacked<C>, Ready, 3, P, 1>(bytes, some, x.add(first), stride, 0, sums);
        }
    }
    vec![packed, unpacked]
}

/// Three tokens.
fn activations(x: &[f32], fine: bool) -> Q8Activations {
    let mut q = Q8Activations::default();
    let grain = Grain {
        fine,
        ..Grain::default()
    };
    q.refill_by(Level::Scalar, x, (3, x.len() / 3), grain)
        .unwrap();
    q
}

#[test]
fn kernels_of_16_rows_agree_with_the_scalar_path() {
    let mut rng = StdRng::seed_from_u64(8);
    let cols = 768;
    for (dtype, fine) in BlockFormat::DTYPES
        .into_iter()
        .flat_map(|d| [(d, false), (d, true)])
    {
        let blocks = quantized(&mut rng, dtype, 16, cols);
        let matrix = PackedMatrix::pack(dtype, 16, cols, &blocks).unwrap();
        let x = activations(&normals(&mut rng, 3 * cols), fine);
        let mut plain = vec![0.0; 3 * 16];
        matrix.forward(Level::Scalar, &x, &mut plain).unwrap();
        let all = match dtype {
            GgmlDType::Q4_0 => products::<Four, Symmetric>(&matrix, &x),
            GgmlDType::Q4_1 => products::<Four, Affine>(&matrix, &x),
            GgmlDType::Q5_0 => products::<Five, Symmetric>(&matrix, &x),
            GgmlDType::Q5_1 => products::<Five, Affine>(&matrix, &x),
            GgmlDType::Q8_0 => products::<Eight, Symmetric>(&matrix, &x),
            GgmlDType::Q2K => products::<Two, Super16>(&matrix, &x),
            GgmlDType::Q3K => products::<Three, SuperSymmetric>(&matrix, &x),
            GgmlDType::Q4K => products::<Four, Super>(&matrix, &x),
            GgmlDType::Q5K => products::<Five, Super>(&matrix, &x),
            _ => products::<Six, SuperSymmetric>(&matrix, &x),
        };
        agree(&all, &plain, &format!("{dtype:?}"));
    }
}

/// Products are about sqrt(768) = 28; f32 sums of 24 blocks err by some 1e-5.
fn agree(all: &[[[f32; ROW_GROUP]; 3]], plain: &[f32], name: &str) {
    for wide in all {
        for (a, b) in wide.as_flattened().iter().zip(plain) {
            assert!((a - b).abs() < 1e-3, "{name}: {a} for {b}");
        }
    }
}

#[test]
fn kernels_of_16_rows_agree_with_the_scalar_path_for_schemes() {
    let mut rng = StdRng::seed_from_u64(9);
    let cols = 768;
    let weights = normals(&mut rng, 16 * cols);
    let x = normals(&mut rng, 3 * cols);
    for (scheme, fine) in schemes().into_iter().flat_map(|s| [(s, false), (s, true)]) {
        let x = activations(&x, fine);
        let codes = quantize(&weights, 16, cols, scheme).unwrap();
        let matrix = PackedMatrix::from_codes(&codes).unwrap();
        let mut plain = vec![0.0; 3 * 16];
        matrix.forward(Level::Scalar, &x, &mut plain).unwrap();
        let all = match (scheme, scheme.group()) {
            (Scheme::Fp8, _) => products::<Float8, OfFloats<0>>(&matrix, &x),
            (Scheme::Fp8Block128, _) => products::<Float8, OfFloats<4>>(&matrix, &x),
            (Scheme::Nvfp4, _) => products::<Float4, RowAndGroup16>(&matrix, &x),
            (Scheme::Nf4, _) => products::<NormalFloat4, ByTwoBlocks>(&matrix, &x),
            (Scheme::Int8, _) => products::<Eight, ByRow>(&matrix, &x),
            (Scheme::Ternary { .. }, None) => products::<Ternary, ByRow>(&matrix, &x),
            (Scheme::Ternary { .. }, Some(32)) => {
                products::<Ternary, ByGroup<1, false>>(&matrix, &x)
            }
            (Scheme::Ternary { .. }, Some(64)) => {
                products::<Ternary, ByGroup<2, false>>(&matrix, &x)
            }
            (Scheme::Ternary { .. }, _) => products::<Ternary, ByGroup<4, false>>(&matrix, &x),
            (_, Some(32)) if scheme.has_zeros() => products::<Four, ByGroup<1, true>>(&matrix, &x),
            (_, Some(64)) if scheme.has_zeros() => products::<Four, ByGroup<2, true>>(&matrix, &x),
            (_, _) if scheme.has_zeros() => products::<Four, ByGroup<4, true>>(&matrix, &x),
            (_, Some(32)) => products::<Four, ByGroup<1, false>>(&matrix, &x),
            (_, Some(64)) => products::<Four, ByGroup<2, false>>(&matrix, &x),
            _ => products::<Four, ByGroup<4, false>>(&matrix, &x),
        };
        agree(&all, &plain, &scheme.to_string());
    }
}
