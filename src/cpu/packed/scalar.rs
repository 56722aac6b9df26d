//! The plain path, right on every architecture.

use super::layout::{Layout, ROW_GROUP};
use super::q8::Q8Block;
use crate::quant::{BlockFormat, Format, Scaling, Scheme, SubBlock, ZERO_STEP, e2m1, e4m3, nf4};

/// The steps of zero points that a code is: with them codes less zero points are whole numbers.
const ZERO_STEPS: i16 = (1. / ZERO_STEP) as i16;

/// Multiplies a row group with the tokens of `x`, `stride` blocks each: all of one part, then those of the next;
/// token `t`'s products become `out[t]`.
pub(super) fn group(
    format: &Format,
    weights: &[u8],
    blocks: usize,
    (x, stride): (&[Q8Block], usize),
    out: &mut [[f32; ROW_GROUP]],
) {
    let layout = Layout::of(format);
    if let Format::Scheme(scheme) = format
        && scheme.multiplies_in_f32()
    {
        return of_floats(*scheme, &layout, weights, blocks, (x, stride), out);
    }
    let unpacked: Vec<Unpacked> = (0..blocks)
        .map(|block| Unpacked::read(format, &layout, weights, block))
        .collect();
    for (x, sums) in x.chunks_exact(stride).zip(out) {
        sums.fill(0.0);
        for part in x.chunks_exact(blocks) {
            for (w, x) in unpacked.iter().zip(part) {
                w.add_products(x, sums);
            }
        }
    }
}

/// [`group`] of e4m3 floats, or those of a table.
fn of_floats(
    scheme: Scheme,
    layout: &Layout,
    weights: &[u8],
    blocks: usize,
    (x, stride): (&[Q8Block], usize),
    out: &mut [[f32; ROW_GROUP]],
) {
    for sums in out.iter_mut() {
        sums.fill(0.0);
    }
    for block in 0..blocks {
        for lane in 0..ROW_GROUP {
            let read = layout.read_scheme(weights, block, lane);
            let floats = read.codes.map(|code| match scheme {
                Scheme::Nf4 => nf4::to_f32(code as u8),
                _ => e4m3::to_f32(code as u8),
            });
            for (x, sums) in x.chunks_exact(stride).zip(&mut *out) {
                for x in x[block..].iter().step_by(blocks) {
                    let products = floats.iter().zip(x.q).map(|(w, q)| w * f32::from(q));
                    sums[lane] += products.sum::<f32>() * read.scale * x.d;
                }
            }
        }
    }
}

/// 32 columns of a row group: signed codes by k, and for each half of k the scales and offsets.
struct Unpacked {
    codes: [[i16; ROW_GROUP]; 32],
    scales: [[f32; ROW_GROUP]; 2],
    offsets: [[f32; ROW_GROUP]; 2],
}

impl Unpacked {
    fn read(format: &Format, layout: &Layout, weights: &[u8], block: usize) -> Self {
        let mut this = Self {
            codes: [[0; ROW_GROUP]; 32],
            scales: [[0.0; ROW_GROUP]; 2],
            offsets: [[0.0; ROW_GROUP]; 2],
        };
        for lane in 0..ROW_GROUP {
            match format {
                Format::Block(format) => this.read_block(format, layout, weights, block, lane),
                Format::Scheme(scheme) => this.read_scheme(*scheme, layout, weights, block, lane),
            }
        }
        this
    }

    fn read_block(
        &mut self,
        format: &BlockFormat,
        layout: &Layout,
        weights: &[u8],
        block: usize,
        lane: usize,
    ) {
        let sub = layout.read(weights, block, lane);
        for (column, code) in self.codes.iter_mut().zip(sub.codes) {
            column[lane] = signed(format, code);
        }
        for half in 0..2 {
            (self.scales[half][lane], self.offsets[half][lane]) = scale(format, &sub, half);
        }
    }

    fn read_scheme(
        &mut self,
        scheme: Scheme,
        layout: &Layout,
        weights: &[u8],
        block: usize,
        lane: usize,
    ) {
        let read = layout.read_scheme(weights, block, lane);
        let is_nvfp4 = scheme == Scheme::Nvfp4;
        for (k, (column, code)) in self.codes.iter_mut().zip(read.codes).enumerate() {
            column[lane] = match is_nvfp4 {
                true => i16::from(e2m1::doubled(code as u8)),
                false => i16::from(code) * ZERO_STEPS - i16::from(read.others[k / 16]),
            };
        }
        for (half, other) in read.others.into_iter().enumerate() {
            self.scales[half][lane] = match is_nvfp4 {
                true => 0.5 * read.scale * e4m3::to_f32(other),
                false => read.scale * ZERO_STEP,
            };
        }
    }

    fn add_products(&self, x: &Q8Block, sums: &mut [f32; ROW_GROUP]) {
        for half in 0..2 {
            let mut dots = [0i32; ROW_GROUP];
            let codes = &self.codes[16 * half..][..16];
            for (column, q) in codes.iter().zip(&x.q[16 * half..]) {
                for (dot, w) in dots.iter_mut().zip(column) {
                    *dot += i32::from(*w) * i32::from(*q);
                }
            }
            let (scales, offsets) = (&self.scales[half], &self.offsets[half]);
            for (lane, sum) in sums.iter_mut().enumerate() {
                *sum += dots[lane] as f32 * scales[lane] * x.d + offsets[lane] * x.sums[half];
            }
        }
    }
}

fn signed(format: &BlockFormat, code: u8) -> i16 {
    match format.scaling {
        Scaling::Symmetric if format.bits == 8 => i16::from(code as i8),
        Scaling::Symmetric | Scaling::SuperSymmetric => i16::from(code) - (1 << (format.bits - 1)),
        Scaling::Affine | Scaling::Super | Scaling::Super16 => i16::from(code),
    }
}

/// The scale and the offset of a half of `sub`.
fn scale(format: &BlockFormat, sub: &SubBlock, half: usize) -> (f32, f32) {
    let (d, m) = (sub.d.to_f32(), sub.m.to_f32());
    match format.scaling {
        Scaling::Symmetric => (d, 0.0),
        Scaling::Affine => (d, m),
        Scaling::Super => (d * f32::from(sub.scales[0]), -m * f32::from(sub.mins[0])),
        Scaling::Super16 => (
            d * f32::from(sub.scales[half]),
            -m * f32::from(sub.mins[half]),
        ),
        Scaling::SuperSymmetric => (d * f32::from(sub.scales[half] as i8), 0.0),
    }
}
