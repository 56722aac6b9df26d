//! Many tokens in AMX's tiles, both operands in bf16.
//!
//! A tile of bf16 takes 32 columns: one block. So 32 values of a token are a row of a tile, and a row group's block,
//! dequantized, is a tile. Sums stay in tiles over a run of steps, as no scale is left to apply. (With tiles of int8 they
//! would have to leave them after each block, which costs more than the products.) Rounding to bf16 changes a weight or a
//! value by at most 2^-9 of itself, which is a fraction of what 8 bits for a block of activations lose. Where these have 16 bits,
//! they and the weights are the sum of two numbers in bf16 each (2^-18), and a product is three of tiles: the method of
//! Henry, Tang and Heinecke ("Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations",
//! 2019).

use super::super::kernel::{Codes, Dequantize, Isa, Kernels, Scale, Scales};
use super::super::layout::ROW_GROUP;
use super::super::matrix::{ROOM, RowGroups};
use super::super::q8::Q8Block;
use super::avx512::{self, Avx512};
use crate::cpu::simd::prefetch;
use crate::cpu::tiles::product::{self, Results, Weights};
use crate::cpu::tiles::tokens::{TokenRows, TokenTiles};
use crate::cpu::tiles::{ROWS, STEP, Tile, Tiles};
use std::arch::x86_64::*;
use std::mem::transmute;
use std::ops::Range;

const _: () = assert!(STEP == 32 && ROWS == ROW_GROUP);

/// AVX-512's kernels, and those for tiles.
pub(in super::super) fn kernels<C: Codes + 'static, S: Scales + 'static>() -> &'static Kernels {
    const {
        &Kernels {
            dequantize: Some([dequantize::<C, S, 1>, dequantize::<C, S, 2>]),
            ..*avx512::kernels::<C, S>()
        }
    }
}

/// [`Dequantize`] for codes C with scales S, to P parts.
///
/// # Safety
/// As there.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c")]
unsafe fn dequantize<C: Codes, S: Scales, const P: usize>(
    weights: *const u8,
    blocks: Range<usize>,
    out: &mut [[Tile; 2]],
    which: usize,
) {
    let layout = S::layout::<C>();
    let zero = match C::BITS {
        _ if C::FLOATS => 0,
        8 => Avx512::EIGHT_BIT_ZERO,
        _ => C::ZERO,
    };
    // Word 2i of the first half and 2i + 1 of the second go to lane i.
    let pairs: [u16; STEP] = std::array::from_fn(|i| (i / 2 + i % 2 * ROWS) as u16);
    // SAFETY: a vector of as many bytes; then block by block this walks over the group, which the caller vouches for.
    unsafe {
        let pairs = _mm512_loadu_si512(pairs.as_ptr().cast());
        for (block, out) in blocks.zip(out.chunks_exact_mut(P)) {
            let (chunk, j) = (block / layout.blocks, block % layout.blocks);
            let head = weights.add(chunk * layout.chunk());
            let planes = head.add(layout.head + j * layout.codes);
            let shared = S::open::<Avx512>(head, 0);
            for part in 0..C::PARTS {
                let scale = S::at::<Avx512>(shared, head, 0, (j, part), zero as f32);
                let mut codes = C::open::<Avx512>(planes, part);
                for i in 0..C::VECTORS {
                    let (codes, k) = codes.next(i);
                    for pair in 0..2 {
                        let mut rest =
                            [2 * pair, 2 * pair + 1].map(|byte| value::<C>(codes, byte, scale));
                        for out in out.iter_mut() {
                            let both = part_of(&mut rest);
                            let row = (&raw mut out[which][k / 2 + pair]).cast();
                            _mm512_store_si512(row, _mm512_permutexvar_epi16(pairs, both));
                        }
                    }
                }
            }
        }
    }
}

/// Both values rounded to bf16, the first in the lower half; what that leaves of them, which is exact, stays.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn part_of(rest: &mut [__m512; 2]) -> __m512i {
    // SAFETY: two types of the same 64 bytes.
    let both: __m512i = unsafe { transmute(_mm512_cvtne2ps_pbh(rest[1], rest[0])) };
    let halves = [
        _mm512_castsi512_si256(both),
        _mm512_extracti64x4_epi64::<1>(both),
    ];
    for (rest, half) in rest.iter_mut().zip(halves) {
        let rounded = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half));
        *rest = _mm512_sub_ps(*rest, _mm512_castsi512_ps(rounded));
    }
    both
}

/// 2^8: an f32 with this exponent and a code in the upper eight bits of its mantissa is `MORE` plus the code.
const MORE: f32 = 256.;

/// What the code in byte `byte` of each lane stands for.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn value<C: Codes>(codes: __m512i, byte: usize, Scale { scale, offset }: Scale<Avx512>) -> __m512 {
    if C::FLOATS {
        // SAFETY: the processor has AVX-512, by this function's features.
        let float = unsafe { C::float::<Avx512>(codes, byte) };
        return _mm512_mul_ps(_mm512_mul_ps(float, _mm512_set1_ps(C::FLOATS_LESS)), scale);
    }
    /// The upper eight bits of the mantissa.
    const CODE: i32 = 0xff << 15;
    let moved = match byte {
        0 => _mm512_slli_epi32::<15>(codes),
        1 => _mm512_slli_epi32::<7>(codes),
        2 => _mm512_srli_epi32::<1>(codes),
        _ => _mm512_srli_epi32::<9>(codes),
    };
    // `moved & CODE | MORE`
    let bits = _mm512_ternarylogic_epi32::<0xf8>(
        _mm512_set1_epi32(MORE.to_bits() as i32),
        moved,
        _mm512_set1_epi32(CODE),
    );
    // This is exact. Folding `MORE` into the offset would round it, and then s and -s could round to different bf16.
    let code = _mm512_sub_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(MORE));
    _mm512_fmadd_ps(code, scale, offset)
}

/// Writes a token's values into the rows of its parts. A block whose values are not all finite, which shows in its
/// scale, is NaN.
///
/// # Safety
/// The processor has AVX-512 with bf16; nobody else has this token's rows, which are of as many blocks.
#[target_feature(enable = "avx512f,avx512bf16")]
pub(in super::super) unsafe fn write_token(
    x: &[f32],
    blocks: &[Q8Block],
    (token, parts): (usize, usize),
    rows: &TokenRows<'_>,
) {
    for (step, (x, block)) in x.as_chunks::<STEP>().0.iter().zip(blocks).enumerate() {
        // Zero or NaN.
        let spoiled = _mm512_set1_ps(0. * block.d);
        let mut rest = [0, ROWS].map(|at| {
            // SAFETY: 16 values from either place on are there.
            _mm512_add_ps(unsafe { _mm512_loadu_ps(x.as_ptr().add(at)) }, spoiled)
        });
        for part in 0..parts {
            let both = part_of(&mut rest);
            // SAFETY: the caller's; a row of a tile has 64 bytes.
            unsafe {
                let row = &raw mut *rows.row(token, step, part);
                _mm512_store_si512(row.cast(), both);
            }
        }
    }
}

/// The row groups of a matrix, and how they become as many parts as tokens have.
pub(in super::super) struct Groups<'a> {
    pub dequantize: Dequantize,
    pub all: RowGroups<'a>,
}

/// The same, of which P parts are made.
struct InParts<'a, const P: usize>(&'a Groups<'a>);

impl<const P: usize> Weights for InParts<'_, P> {
    const PARTS: usize = P;

    unsafe fn tiles(
        &self,
        rows: &Range<usize>,
        steps: &Range<usize>,
        out: &mut [[Tile; 2]],
    ) -> bool {
        let mut room = ROOM.take();
        for (which, row) in rows.clone().step_by(ROW_GROUP).enumerate() {
            let (group, steps) = self.0.all.part(row / ROW_GROUP, steps, &mut room);
            // SAFETY: the caller's; rows begin with a group's first, and a step is a block.
            unsafe { (self.0.dequantize)(group.as_ptr(), steps, out, which) };
        }
        ROOM.set(room);
        true
    }

    /// Runs of blocks are too short for the hardware's prefetching.
    fn prefetch(&self, rows: &Range<usize>, steps: &Range<usize>) {
        for row in rows.clone().step_by(ROW_GROUP) {
            for line in self.0.all.bytes(row / ROW_GROUP, steps).chunks(64) {
                prefetch::<2, _>(line.as_ptr());
            }
        }
    }
}

/// The products of a matrix's rows, from a group's first on, with tokens of as many blocks.
///
/// # Safety
/// The processor has AVX-512 with bf16, and AMX as [`Tiles`] need it; the groups are of the format of
/// `dequantize`; there are such rows and tokens, and their results' places are writable.
pub(in super::super) unsafe fn products(w: &Groups<'_>, x: &TokenTiles, to: &Results) {
    // SAFETY: the caller's.
    unsafe {
        match x.parts() {
            1 => product::products::<Tiles, _>(&InParts::<1>(w), x, to),
            _ => product::products::<Tiles, _>(&InParts::<2>(w), x, to),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::packed::registry::{self, Run, Tokens};
    use crate::cpu::packed::scheme_tests::schemes;
    use crate::cpu::packed::tests::{normals, quantized};
    use crate::cpu::packed::{Grain, PackedMatrix, Q8Activations};
    use crate::cpu::simd::{self, Level};
    use crate::quant::{BlockFormat, quantize};
    use rand::{SeedableRng, rngs::StdRng};
    use std::sync::Arc;

    /// Whether the kernels can run here, on emulated tiles at least.
    fn can_run() -> bool {
        simd::best() >= Level::Avx512Bf16
    }

    /// Of every format, and of those of GGUF in place, too.
    fn matrices(rows: usize, cols: usize) -> Vec<PackedMatrix> {
        let mut rng = StdRng::seed_from_u64(47);
        let values = normals(&mut rng, rows * cols);
        let blocks = BlockFormat::DTYPES.into_iter().flat_map(|dtype| {
            let blocks = quantized(&mut rng, dtype, rows, cols);
            let packed = PackedMatrix::pack(dtype, rows, cols, &blocks);
            let in_place = PackedMatrix::in_place(dtype, rows, cols, Arc::new(blocks), 0);
            [packed.unwrap(), in_place.unwrap()]
        });
        let schemes = schemes().into_iter().map(|scheme| {
            PackedMatrix::from_codes(&quantize(&values, rows, cols, scheme).unwrap()).unwrap()
        });
        blocks.chain(schemes).collect()
    }

    /// Quantizes tokens, whatever their number, and puts them into tiles.
    fn fill(x: &mut Q8Activations, values: &[f32], (m, k): (usize, usize), grain: Grain) {
        x.refill_by(Level::Scalar, values, (m, k), grain).unwrap();
        let rows = x.rows(true);
        for (t, values) in values.chunks_exact(k).enumerate() {
            // SAFETY: no other row is in use.
            unsafe { rows.row(t) }
                .quantize(simd::best(), values)
                .unwrap();
        }
    }

    fn in_tiles(values: &[f32], shape: (usize, usize), grain: Grain) -> Q8Activations {
        let mut x = Q8Activations::default();
        fill(&mut x, values, shape, grain);
        x
    }

    fn run(
        matrix: &PackedMatrix,
        x: &Q8Activations,
        rows: Range<usize>,
        tokens: Range<usize>,
    ) -> Vec<f32> {
        let case = Tokens {
            count: tokens.len(),
            only: false,
            tables: false,
            wide: false,
            fine: x.grain().fine,
            tiles: true,
        };
        let kernel = registry::select(&matrix.format, Level::Amx, case);
        let Run::Amx(dequantize) = kernel.run else {
            panic!("{matrix:?} has {}", kernel.name);
        };
        let stride = rows.len() + 3;
        let mut out = vec![f32::NAN; tokens.len() * stride];
        let size = rows.len();
        let all = matrix.groups();
        let groups = Groups { dequantize, all };
        let results = Results {
            rows,
            tokens,
            out: out.as_mut_ptr(),
            stride,
        };
        // SAFETY: rows and tokens are the matrices', and `out` has a row for each token.
        unsafe { products(&groups, x.tiles().unwrap(), &results) };
        assert!(!Tiles::in_use(), "tiles are released");
        let mut lines = out.chunks_exact(stride);
        assert!(
            lines.all(|line| line[size..].iter().all(|v| v.is_nan())),
            "{matrix:?}: written beyond a row"
        );
        out.chunks_exact(stride)
            .flat_map(|line| &line[..size])
            .copied()
            .collect()
    }

    #[test]
    fn every_format_is_multiplied_in_one_part_and_in_two() {
        if !can_run() {
            return;
        }
        // More than a run of steps, which does not end with one.
        let (rows, cols, m) = (70, 1280, 50);
        for matrix in matrices(rows, cols) {
            let mut rng = StdRng::seed_from_u64(48);
            for fine in [false, true] {
                let grain = Grain {
                    fine,
                    ..Grain::default()
                };
                // By the mean squares it is far less than by the sum of magnitudes.
                let most: f64 = if fine { 1e-5 } else { 5e-3 };
                // Not zero on average: offsets of all weights of a row would add up.
                let values: Vec<_> = normals(&mut rng, m * cols).iter().map(|x| x + 1.).collect();
                let x = in_tiles(&values, (m, cols), grain);
                // All of it, and a part that begins and ends within tiles.
                for (some, tokens) in [(0..rows, 0..m), (16..39, 5..38)] {
                    let out = run(&matrix, &x, some.clone(), tokens.clone());
                    let mut w = vec![0.; cols];
                    let (mut errors, mut squares) = (0., 0.);
                    for (at, got) in out.into_iter().enumerate() {
                        let t = tokens.start + at / some.len();
                        let row = some.start + at % some.len();
                        matrix.dequantize_row(row, &mut w).unwrap();
                        let terms = w.iter().zip(&values[t * cols..]);
                        let terms = terms.map(|(w, x)| f64::from(*w) * f64::from(*x));
                        let (exact, size) = terms.fold((0., 0.), |(s, a), t| (s + t, a + t.abs()));
                        let error = (f64::from(got) - exact).abs();
                        // Both operands are off by 2^-9 of themselves at most, and sums by roundings of f32.
                        assert!(
                            error <= size * (1. / 256. + 1e-5),
                            "{matrix:?} at {t}, {row}: {got} for {exact}"
                        );
                        (errors, squares) = (errors + error * error, squares + exact * exact);
                    }
                    let error = (errors / squares).sqrt();
                    assert!(error <= most, "{matrix:?}, {grain:?}: {error}");
                }
            }
        }
    }

    #[test]
    fn a_token_that_is_not_finite_spoils_its_own_results_only() {
        if !can_run() {
            return;
        }
        let matrix = &matrices(32, 768)[0];
        let mut values = normals(&mut StdRng::seed_from_u64(49), 40 * 768);
        values[3 * 768 + 5] = f32::INFINITY;
        let x = in_tiles(&values, (40, 768), Grain::default());
        for (at, got) in run(matrix, &x, 0..32, 0..40).into_iter().enumerate() {
            assert_eq!(got.is_nan(), at / 32 == 3, "{at}");
        }
    }

    #[test]
    fn tokens_change_with_the_rows_they_are_made_of() {
        if !can_run() {
            return;
        }
        let matrix = &matrices(16, 256)[0];
        let [ones, twos] = [1f32, 2.].map(|v| vec![v; 33 * 256]);
        let mut x = in_tiles(&ones, (33, 256), Grain::default());
        let before = run(matrix, &x, 0..16, 0..33);
        fill(&mut x, &twos[..20 * 256], (20, 256), Grain::default());
        let after = run(matrix, &x, 0..16, 0..20);
        x.reset(20, 256).unwrap();
        assert!(x.tiles().is_none());
        assert!(
            before
                .iter()
                .zip(after)
                .all(|(before, after)| 2. * before == after)
        );
    }
}
