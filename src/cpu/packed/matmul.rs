//! Products of packed matrices with quantized activations.

use super::activations::{Q8Activations, Q8Block};
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use super::kernel;
use super::layout::ROW_GROUP;
use super::matrix::PackedMatrix;
use super::store::Line;
#[cfg(target_arch = "x86_64")]
use super::x86::ternary;
use super::{runnable, scalar};
use crate::cpu::pool;
use crate::cpu::simd::Level;
use crate::quant::Format;
use candle_core::{Result, bail};
use std::cell::RefCell;
use std::ops::Range;

/// Bytes of activations that are multiplied with one row group after another: they should stay in
/// the second-level cache together with the group.
const TOKEN_BYTES: usize = 192 * 1024;

/// Tokens from which on unpacking a row group first is faster than unpacking it in every tile.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const UNPACK_FROM: usize = 16;

/// Room for unpacked weights.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[repr(align(64))]
struct Scratch([u8; kernel::UNPACKED_BYTES]);

thread_local! {
    /// The row group in hand, of a matrix that is not packed.
    static ROOM: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// The vector kernels for a format, if there are any.
#[derive(Clone, Copy)]
struct Cores(
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))] Option<&'static kernel::Kernels>,
);

impl Cores {
    /// Those of a level that this processor has.
    fn of(format: &Format, level: Level) -> Self {
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        return Self(kernel::kernels(format, level));
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        {
            let _ = (format, level);
            Self()
        }
    }
}

impl PackedMatrix {
    /// `out[(t - tokens.start) * out_stride + (r - rows.start)]` = sum over k of W[r, k] x[t, k], for
    /// the given rows and tokens, on the calling thread.
    ///
    /// The dot product of each 32 (Q6_K: 16) codes is exact; these are added up in f32 along k, so
    /// that levels differ by roundings of f32 only. A `level` that the processor does not have gives
    /// its best instead.
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
        let level = runnable(level);
        #[cfg(target_arch = "x86_64")]
        if let Format::Scheme(scheme) = self.format
            && tokens.len() == 1
            && let Some(one_token) = ternary::kernel(&scheme, level, x)
        {
            // SAFETY: `level` is runnable, and the only token, of which the kernel knows, has as many blocks as the
            // matrix; the rest is the caller's.
            return unsafe { self.one_token(one_token, &rows, x, out) };
        }
        let blocks = self.blocks();
        let some = (TOKEN_BYTES / (blocks * size_of::<Q8Block>())).max(8) / 8 * 8;
        let mut one = [[0.0; ROW_GROUP]; 8];
        let mut many = Vec::new();
        let sums = match tokens.len() {
            0..=8 => &mut one[..],
            m => {
                many.resize(m.min(some), [0.0; ROW_GROUP]);
                &mut many[..]
            }
        };
        let cores = Cores::of(&self.format, level);
        let (groups, mut room) = (self.groups(), ROOM.take());
        for start in tokens.clone().step_by(some) {
            let end = tokens.end.min(start + some);
            let x = &x.blocks()[start * blocks..end * blocks];
            for first in rows.clone().step_by(ROW_GROUP) {
                let weights = groups.get(first / ROW_GROUP, &mut room);
                let count = ROW_GROUP.min(rows.end - first);
                let sums = &mut sums[..end - start];
                self.group_products(cores, weights, x, sums);
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

    /// The products of `rows` with the only token of `x`.
    ///
    /// # Safety
    /// The kernel is for this format, a level that the processor has, and `x`, which is of this width; `out` has room
    /// for the rows.
    #[cfg(target_arch = "x86_64")]
    unsafe fn one_token(
        &self,
        kernel: ternary::OneToken,
        rows: &Range<usize>,
        x: &Q8Activations,
        out: *mut f32,
    ) {
        let (groups, mut room) = (self.groups(), Vec::new());
        let tables = x
            .tables()
            .map_or(std::ptr::null(), |tables| tables.as_ptr());
        let token = (x.blocks().as_ptr(), tables);
        for first in rows.clone().step_by(ROW_GROUP) {
            let weights = groups.get(first / ROW_GROUP, &mut room).as_ptr();
            let mut sums = [0.0; ROW_GROUP];
            let count = ROW_GROUP.min(rows.end - first);
            // SAFETY: the group is one of this format; `count` values from there on belong to the
            // rows. The rest is the caller's.
            unsafe {
                kernel(weights, self.blocks(), token, &mut sums);
                let out = out.add(first - rows.start);
                std::ptr::copy_nonoverlapping(sums.as_ptr(), out, count);
            }
        }
    }

    /// The products of a row group with all tokens of `x`.
    fn group_products(
        &self,
        cores: Cores,
        weights: &[u8],
        x: &[Q8Block],
        sums: &mut [[f32; ROW_GROUP]],
    ) {
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        if let Some(kernels) = cores.0 {
            sums.fill([0.0; ROW_GROUP]);
            // SAFETY: the kernels' level is runnable, `weights` is a group of this format, and `x` and
            // `sums` have a row for each token.
            unsafe { self.vector_products(kernels, weights, x, sums) };
            return;
        }
        let _ = cores;
        scalar::group(&self.format, weights, self.blocks(), x, sums);
    }

    /// [`Self::group_products`] with vector kernels, added to `sums`.
    ///
    /// # Safety
    /// The processor has the kernels' level, `weights` is a group, and `x` has `sums.len()` tokens.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    unsafe fn vector_products(
        &self,
        kernels: &kernel::Kernels,
        weights: &[u8],
        x: &[Q8Block],
        sums: &mut [[f32; ROW_GROUP]],
    ) {
        let blocks = self.blocks();
        let run = |tiles: &[(usize, kernel::Tile)],
                   weights: *const u8,
                   (first, some): (usize, usize),
                   sums: &mut [[f32; ROW_GROUP]]| {
            let mut t = 0;
            for (count, tile) in tiles {
                while sums.len() - t >= *count {
                    let x = x[t * blocks + first..].as_ptr();
                    // SAFETY: `count` more tokens are there, of which blocks from `first` on are
                    // multiplied with `some` blocks of weights.
                    unsafe { tile(weights, some, x, blocks, sums[t..].as_mut_ptr()) };
                    t += count;
                }
            }
        };
        match kernels.unpacked {
            Some((unpack, tiles)) if sums.len() >= UNPACK_FROM => {
                let mut bytes = Scratch([0; kernel::UNPACKED_BYTES]);
                for first in (0..blocks).step_by(kernel::UNPACKED_BLOCKS) {
                    let some = kernel::UNPACKED_BLOCKS.min(blocks - first);
                    // SAFETY: the group has these blocks.
                    unsafe {
                        unpack(weights.as_ptr(), first..first + some, bytes.0.as_mut_ptr());
                    }
                    run(tiles, bytes.0.as_ptr(), (first, some), sums);
                }
            }
            _ => run(kernels.packed, weights.as_ptr(), (0, blocks), sums),
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
