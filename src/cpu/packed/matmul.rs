//! Products of packed matrices with quantized activations.

use super::activations::Q8Activations;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use super::kernel::{Tiles, UNPACKED_BLOCKS, UNPACKED_BYTES};
use super::layout::ROW_GROUP;
use super::matrix::{PackedMatrix, ROOM};
use super::q8::Q8Block;
use super::registry::{self, Kernel, Run, Tokens};
use super::scalar;
#[cfg(target_arch = "x86_64")]
use super::x86::amx;
use crate::cpu::simd::Level;
#[cfg(target_arch = "x86_64")]
use crate::cpu::tiles::product::Results;
use crate::pool;
use candle_core::{Result, bail};
use std::ops::Range;

/// Bytes of activations that are multiplied with one row group after another: they should stay in
/// the second-level cache together with the group.
const TOKEN_BYTES: usize = 192 * 1024;

/// Room for unpacked weights.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[repr(align(64))]
struct Scratch([u8; UNPACKED_BYTES]);

impl PackedMatrix {
    /// `out[(t - tokens.start) * out_stride + (r - rows.start)]` = sum over k of W[r, k] x[t, k], for
    /// the given rows and tokens, on the calling thread.
    ///
    /// The dot product of each 32 (Q2_K, Q3_K and Q6_K: 16) codes is exact; these are added up in f32 along k, so
    /// that levels differ by roundings of f32 only. AMX takes weights and many tokens in bf16 instead, in one part or two
    /// ([`Q8Activations`]), with sums in f32, unless the tokens were filled by row. A `level` that the processor does not have gives its best instead.
    ///
    /// # Errors
    /// If `rows` does not start on a multiple of [`ROW_GROUP`] or reaches past the matrix, `tokens`
    /// reaches past `x`, the widths differ, or `out` is too short.
    pub fn matmul(
        &self,
        level: Level,
        rows: Range<usize>,
        x: &Q8Activations,
        tokens: Range<usize>,
        out: &mut [f32],
        out_stride: usize,
    ) -> Result<()> {
        self.check(&rows, x, &tokens)?;
        check_out(rows.len(), tokens.len(), out.len(), out_stride)?;
        // SAFETY: both checks passed.
        unsafe { self.matmul_unchecked(level, rows, x, tokens, out.as_mut_ptr(), out_stride) };
        Ok(())
    }

    /// The whole product, m x rows into `out` (row-major, without gaps), over the pool.
    ///
    /// # Errors
    /// If the widths differ, or `out` does not have m x rows values.
    pub fn forward(&self, level: Level, x: &Q8Activations, out: &mut [f32]) -> Result<()> {
        let (m, rows) = (x.m(), self.rows());
        self.check(&(0..rows), x, &(0..m))?;
        if m.checked_mul(rows) != Some(out.len()) {
            bail!(
                "out: {} values given, expected m x rows = {m} x {rows}",
                out.len()
            );
        }
        let out = Out(out.as_mut_ptr());
        let work = |range: Range<usize>| {
            // SAFETY: checked above; tasks write different columns of `out`, which is m x rows.
            unsafe {
                let first = out.at(range.start);
                self.matmul_unchecked(level, range, x, 0..m, first, rows);
            }
        };
        pool::for_ranges(rows, self.grain(m), work);
        Ok(())
    }

    /// Columns with the zeros that fill the last block of 32, where a scheme's rows do not: the width of
    /// the activations.
    pub fn padded_cols(&self) -> usize {
        self.cols().next_multiple_of(32)
    }

    /// Rows for which a task is worth its hand-over (about a microsecond), in whole groups.
    fn grain(&self, m: usize) -> usize {
        let products = ROW_GROUP * self.cols() * m.max(1);
        ROW_GROUP * 65_536usize.div_ceil(products)
    }

    /// As [`Self::matmul`], for callers that split an output between threads.
    ///
    /// # Safety
    /// `rows`, `x` and `tokens` are as `matmul` wants them, and every place of `out` that it would
    /// write is writable and not accessed by others meanwhile.
    pub unsafe fn matmul_unchecked(
        &self,
        level: Level,
        rows: Range<usize>,
        x: &Q8Activations,
        tokens: Range<usize>,
        out: *mut f32,
        out_stride: usize,
    ) {
        debug_assert!(self.check(&rows, x, &tokens).is_ok());
        let level = level.supported();
        #[cfg(target_arch = "x86_64")]
        if let Run::Amx(dequantize) = self.kernel(level, x, tokens.len()).run
            && let Some(x) = x.tiles()
        {
            let results = Results {
                rows,
                tokens,
                out,
                stride: out_stride,
            };
            let all = self.groups();
            let groups = amx::Groups { dequantize, all };
            // SAFETY: the processor has AMX, for which tiles were made; the rest is the caller's.
            return unsafe { amx::products(&groups, x, &results) };
        }
        let some = self.tokens_at_a_time(x.parts());
        let mut one = [[0.0; ROW_GROUP]; 8];
        let mut many = Vec::new();
        let sums = match tokens.len() {
            0..=8 => &mut one[..],
            m => {
                many.resize(m.min(some), [0.0; ROW_GROUP]);
                &mut many[..]
            }
        };
        let (groups, mut room) = (self.groups(), ROOM.take());
        for start in tokens.clone().step_by(some) {
            let end = tokens.end.min(start + some);
            let kernel = self.kernel(level, x, end - start);
            for first in rows.clone().step_by(ROW_GROUP) {
                let weights = groups.get(first / ROW_GROUP, &mut room);
                let count = ROW_GROUP.min(rows.end - first);
                let sums = &mut sums[..end - start];
                self.group_products(kernel.run, weights, x, start, sums);
                for (t, sums) in sums.iter().enumerate() {
                    let at = (start - tokens.start + t) * out_stride + (first - rows.start);
                    // SAFETY: `count` values from there on belong to token and rows; by contract
                    // they are writable.
                    unsafe { std::ptr::copy_nonoverlapping(sums.as_ptr(), out.add(at), count) };
                }
            }
        }
        ROOM.set(room);
    }

    /// Tokens of so many parts that are multiplied with one row group after another.
    fn tokens_at_a_time(&self, parts: usize) -> usize {
        (TOKEN_BYTES / (self.blocks() * parts * size_of::<Q8Block>())).max(8) / 8 * 8
    }

    fn kernel(&self, level: Level, x: &Q8Activations, count: usize) -> Kernel {
        let tokens = Tokens {
            count,
            fine: x.grain().fine,
            only: count == 1 && x.m() == 1,
            #[cfg(target_arch = "x86_64")]
            tables: x.tables().is_some(),
            #[cfg(not(target_arch = "x86_64"))]
            tables: false,
            wide: x.grain().is_wide(),
            tiles: x.has_tiles(),
        };
        registry::select(&self.format, level, tokens)
    }

    /// The kernel that [`Self::matmul`] runs for `tokens` tokens of `x`, as in `avx2_tiles`.
    ///
    /// ```
    /// use candle_fused::cpu::packed::{PackedMatrix, Q8Activations, ROW_GROUP};
    /// use candle_fused::cpu::simd;
    /// use candle_fused::quant::{Scheme, quantize};
    /// let level = simd::level();
    /// let matrix = PackedMatrix::from_codes(&quantize(&[0.5; 32 * 64], 32, 64, Scheme::Int8)?)?;
    /// let x = Q8Activations::quantize(level, &[1.; 64], 1, matrix.padded_cols())?;
    /// let mut all = [0.; 32];
    /// matrix.forward(level, &x, &mut all)?;
    /// assert!(all.iter().all(|y| (y - 32.).abs() < 0.1));
    /// // The second group of rows alone, on this thread.
    /// let (mut some, mut same) = ([0.; ROW_GROUP], [0.; ROW_GROUP]);
    /// matrix.matmul(level, ROW_GROUP..32, &x, 0..1, &mut some, ROW_GROUP)?;
    /// // SAFETY: rows and token exist, and `same` has room for them.
    /// unsafe { matrix.matmul_unchecked(level, ROW_GROUP..32, &x, 0..1, same.as_mut_ptr(), ROW_GROUP) };
    /// assert_eq!((&some[..], &same[..]), (&all[ROW_GROUP..], &all[ROW_GROUP..]));
    /// println!("{}", matrix.kernel_name(level, &x, 1));
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn kernel_name(&self, level: Level, x: &Q8Activations, tokens: usize) -> &'static str {
        let count = tokens.min(self.tokens_at_a_time(x.parts()));
        self.kernel(level.supported(), x, count).name
    }

    /// The products of a row group with tokens `first..first + sums.len()` of `x`, by the kernel that was selected
    /// for them.
    fn group_products(
        &self,
        run: Run,
        weights: &[u8],
        x: &Q8Activations,
        first: usize,
        sums: &mut [[f32; ROW_GROUP]],
    ) {
        let blocks = self.blocks();
        #[cfg(target_arch = "x86_64")]
        let tables = x.tables().map_or(std::ptr::null(), <[_]>::as_ptr);
        let stride = x.parts() * blocks;
        let x = &x.blocks()[first * stride..][..sums.len() * stride];
        sums.fill([0.0; ROW_GROUP]);
        match run {
            Run::Scalar => scalar::group(&self.format, weights, blocks, (x, stride), sums),
            // SAFETY: the processor has the kernel's level, `weights` is a group of this format, and `x` and
            // `sums` have a row for each token.
            #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
            Run::Tiles(tiles) => unsafe {
                tile_products(tiles, weights.as_ptr(), (x, stride), 0..blocks, sums);
            },
            #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
            Run::Unpacked(unpack, tiles) => {
                let mut bytes = Scratch([0; UNPACKED_BYTES]);
                for start in (0..blocks).step_by(UNPACKED_BLOCKS) {
                    let part = start..blocks.min(start + UNPACKED_BLOCKS);
                    // SAFETY: as above; the group has these blocks, for which there is room.
                    unsafe {
                        unpack(weights.as_ptr(), part.clone(), bytes.0.as_mut_ptr());
                        tile_products(tiles, bytes.0.as_ptr(), (x, stride), part, sums);
                    }
                }
            }
            #[cfg(target_arch = "x86_64")]
            Run::Amx(_) => unreachable!("products in tiles have all of k at once"),
            // SAFETY: as above; this is the only token, of which the kernel knows whether it has tables.
            #[cfg(target_arch = "x86_64")]
            Run::OneToken(kernel) => unsafe {
                kernel(weights.as_ptr(), blocks, (x.as_ptr(), tables), &mut sums[0]);
            },
        }
    }

    fn check(&self, rows: &Range<usize>, x: &Q8Activations, tokens: &Range<usize>) -> Result<()> {
        if x.k() != self.padded_cols() {
            bail!(
                "x: tokens have {} values, but the matrix has {} columns",
                x.k(),
                self.cols()
            );
        }
        if rows.start > rows.end || rows.end > self.rows() || !rows.start.is_multiple_of(ROW_GROUP)
        {
            bail!(
                "rows: {rows:?} is not a range of the matrix's {} rows that starts on a multiple \
                 of {ROW_GROUP}",
                self.rows()
            );
        }
        if tokens.start > tokens.end || tokens.end > x.m() {
            bail!(
                "tokens: {tokens:?} is not a range of the {} tokens of x",
                x.m()
            );
        }
        Ok(())
    }
}

/// Adds the products of weights with blocks `some` of each token in `x`, which are `stride` blocks apart, to `sums`.
///
/// # Safety
/// The processor has the tiles' level, `weights` are these blocks of a row group as the tiles take them, and `x`
/// has `sums.len()` tokens of as many parts as the tiles take.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
unsafe fn tile_products(
    tiles: Tiles,
    weights: *const u8,
    (x, stride): (&[Q8Block], usize),
    some: Range<usize>,
    sums: &mut [[f32; ROW_GROUP]],
) {
    let mut t = 0;
    for (count, tile) in tiles {
        while sums.len() - t >= *count {
            let x = x[t * stride + some.start..].as_ptr();
            // SAFETY: `count` more tokens are there, of which these blocks are multiplied with those of weights.
            unsafe { tile(weights, some.len(), x, stride, sums[t..].as_mut_ptr()) };
            t += count;
        }
    }
}

/// Checks that `len` values hold `tokens` lines of `rows` values, `stride` apart.
fn check_out(rows: usize, tokens: usize, len: usize, stride: usize) -> Result<()> {
    if rows == 0 || tokens == 0 {
        return Ok(());
    }
    if tokens > 1 && stride < rows {
        bail!("out_stride: {stride} is less than the {rows} rows of a token");
    }
    let needed = (tokens - 1)
        .checked_mul(stride)
        .and_then(|n| n.checked_add(rows));
    if needed.is_none_or(|needed| len < needed) {
        bail!("out: {len} values given for {tokens} tokens of {rows} rows, {stride} apart");
    }
    Ok(())
}

/// An output that tasks share.
struct Out(*mut f32);

// SAFETY: tasks write different places.
unsafe impl Sync for Out {}

impl Out {
    /// # Safety
    /// The output has more than `offset` values.
    unsafe fn at(&self, offset: usize) -> *mut f32 {
        // SAFETY: the caller's.
        unsafe { self.0.add(offset) }
    }
}
