//! Activations in 8 bits: what the packed matrices are multiplied with.

use super::q8::{Grain, Q8Block};
use super::rounding;
#[cfg(target_arch = "x86_64")]
use super::x86::amx;
#[cfg(target_arch = "x86_64")]
use super::x86::rounding as levels;
#[cfg(target_arch = "x86_64")]
use super::x86::{ternary::TableLine, ternary_avx2};
use crate::cpu::simd::Level;
#[cfg(target_arch = "x86_64")]
use crate::cpu::tiles::tokens::{TokenRows, TokenTiles};
use crate::pool;
use candle_core::{Result, bail};
use std::cell::Cell;
use std::marker::PhantomData;

/// A matrix of activations, m tokens x k, quantized to 8 bits in blocks of 32 along k:
/// d = max |x| / 127, q = round(x / d) to nearest even, with the sums of q that zero points and
/// minima of the weights need.
///
/// The error of a value is at most d / 2 (and a rounding of f32), with [`Grain::fine`] d / 256. A block of zeros, or
/// of magnitudes below 1e-35, is zero. A block with a NaN or an infinity gets d = NaN, so that every product with that
/// token is NaN. With [`Grain::wide`], d is that of 128 values instead of 32, with [`Grain::whole`] that of the token.
///
/// Of many tokens that are quantized at once at a level with AMX, bf16 takes the place of 8 bits in products, and two
/// numbers in bf16 that of 16 bits: these are off by 2^-9 and 2^-18 of themselves at most. Tokens with one scale
/// ([`Grain::whole`]) stay whole numbers.
///
/// Two parts of a number in a narrow type, multiplied one after the other into one sum, are the method of Henry,
/// Tang and Heinecke ("Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision
/// Computations", 2019), here with integers.
///
/// ```
/// use candle_fused::cpu::packed::{Grain, Q8Activations};
/// use candle_fused::cpu::simd;
/// let (level, x) = (simd::level(), [0.5; 2 * 32]);
/// let mut row = [0.; 32];
/// let mut activations = Q8Activations::quantize(level, &x, 2, 32)?;
/// activations.dequantize_row(1, &mut row)?;
/// assert!(row.iter().all(|v| (v - 0.5).abs() < 1e-3));
/// assert_eq!((activations.m(), activations.k(), activations.grain()), (2, 32, Grain::default()));
///
/// // In the same memory: one token, in 16 bits.
/// let fine = Grain { fine: true, ..Grain::default() };
/// activations.refill_by(level, &x[..32], (1, 32), fine)?;
/// assert!(activations.refill(level, &x, 1, 32).is_err());
///
/// // By row, as several threads can.
/// let mut activations = Q8Activations::zeros(2, 32)?;
/// activations.reset(1, 32)?;
/// let rows = activations.rows_mut();
/// // SAFETY: nobody else has this row.
/// unsafe { rows.row(0) }.quantize(level, &x[..32])?;
/// // For products with ternary weights.
/// activations.prepare_look_ups(level);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Q8Activations {
    m: usize,
    k: usize,
    /// A row for each token, or two if they are fine: the coarse part, then the fine one. Behind them is what larger
    /// activations left, so that what comes after them need not be cleared.
    blocks: Vec<Q8Block>,
    /// Blocks of these activations.
    filled: usize,
    grain: Grain,
    /// Tables of sums of a single token, and whether they have been made.
    #[cfg(target_arch = "x86_64")]
    tables: (Vec<TableLine>, bool),
    /// All tokens as AMX multiplies them, and whether they are there.
    #[cfg(target_arch = "x86_64")]
    tiles: (TokenTiles, bool),
}

/// Whether tokens are put into tiles, too: AMX multiplies this many faster than AVX-512. Tokens with one scale belong to
/// models that were trained with inputs rounded so, and are multiplied as the whole numbers they are.
fn takes_tiles(level: Level, m: usize, grain: Grain) -> bool {
    #[cfg(target_arch = "x86_64")]
    return level == Level::Amx && !grain.whole && m >= if grain.fine { 48 } else { 32 };
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = (level, m, grain);
        false
    }
}

impl Q8Activations {
    /// Makes the tables from which [`PackedMatrix::matmul`](super::PackedMatrix::matmul) with ternary
    /// weights looks up sums instead of multiplying: for a single token, where the processor's best
    /// level is AVX2 (with AVX-512 VNNI multiplying is faster). The products are the same up to
    /// roundings of f32; nothing happens where there is no such form.
    pub fn prepare_look_ups(&mut self, level: Level) {
        #[cfg(target_arch = "x86_64")]
        if self.m == 1 && !self.grain.fine && level.supported() == Level::Avx2 {
            // SAFETY: the processor has this level.
            unsafe { ternary_avx2::tables(&self.blocks[..self.k / 32], &mut self.tables.0) };
            self.tables.1 = true;
        }
        let _ = level;
    }

    /// All tokens in tiles, if they are there.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn tiles(&self) -> Option<&TokenTiles> {
        self.tiles.1.then_some(&self.tiles.0)
    }

    /// Whether products take AMX's tiles.
    pub(crate) fn has_tiles(&self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return self.tiles.1;
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// The tables of the only token, if they have been made.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn tables(&self) -> Option<&[TableLine]> {
        self.tables.1.then_some(self.tables.0.as_slice())
    }

    /// Room for `m` tokens of width `k`, all zero, to be filled by row.
    ///
    /// # Errors
    /// If `k` is not a positive multiple of 32.
    pub fn zeros(m: usize, k: usize) -> Result<Self> {
        let mut this = Self::default();
        this.reset(m, k)?;
        Ok(this)
    }

    /// Quantizes `x`, row-major m x k.
    ///
    /// # Errors
    /// If `k` is not a positive multiple of 32 or `x` does not have m x k values.
    pub fn quantize(level: Level, x: &[f32], m: usize, k: usize) -> Result<Self> {
        let mut this = Self::default();
        this.refill(level, x, m, k)?;
        Ok(this)
    }

    /// As [`Self::quantize`], into this value's memory; many rows are spread over the pool.
    ///
    /// # Errors
    /// As [`Self::quantize`]; this value is unchanged then.
    pub fn refill(&mut self, level: Level, x: &[f32], m: usize, k: usize) -> Result<()> {
        self.refill_by(level, x, (m, k), Grain::default())
    }

    /// As [`Self::refill`], with scales and bits as `grain` says.
    ///
    /// # Errors
    /// As [`Self::quantize`]; this value is unchanged then.
    pub fn refill_by(
        &mut self,
        level: Level,
        x: &[f32],
        (m, k): (usize, usize),
        grain: Grain,
    ) -> Result<()> {
        if m.checked_mul(k) != Some(x.len()) {
            bail!("x: {} values given, expected m x k = {m} x {k}", x.len());
        }
        self.resize(m, k, grain)?;
        let level = level.supported();
        let rows = self.rows(takes_tiles(level, m, grain));
        pool::for_ranges(m, rows_of_a_task(k), |range| {
            for t in range {
                // SAFETY: the ranges are disjoint, so no other task has this row.
                unsafe { rows.row(t) }.quantize_at(level, &x[t * k..][..k]);
            }
        });
        Ok(())
    }

    /// As [`Self::refill_by`], of rows that `make` writes, given their number, over another row.
    pub(crate) fn refill_from(
        &mut self,
        level: Level,
        (m, k): (usize, usize),
        grain: Grain,
        make: impl Fn(usize, &mut [f32]) + Sync,
    ) -> Result<()> {
        self.resize(m, k, grain)?;
        let level = level.supported();
        let rows = self.rows(takes_tiles(level, m, grain));
        pool::for_ranges(m, rows_of_a_task(k), |range| {
            let mut made = MADE.take();
            made.resize(k, 0.);
            for t in range {
                make(t, &mut made);
                // SAFETY: the ranges are disjoint, so no other task has this row.
                unsafe { rows.row(t) }.quantize_at(level, &made);
            }
            MADE.set(made);
        });
        Ok(())
    }

    /// Makes room for `m` tokens of width `k`, in the memory that is there if it suffices. What the
    /// rows hold is unspecified until they are filled (see [`Self::rows_mut`]).
    ///
    /// # Errors
    /// If `k` is not a positive multiple of 32.
    pub fn reset(&mut self, m: usize, k: usize) -> Result<()> {
        self.resize(m, k, Grain::default())
    }

    fn resize(&mut self, m: usize, k: usize, grain: Grain) -> Result<()> {
        if k == 0 || !k.is_multiple_of(32) {
            bail!("k: {k} is not a positive multiple of 32");
        }
        let blocks = m.checked_mul(k / 32);
        let Some(len) = blocks.and_then(|n| n.checked_mul(grain.parts())) else {
            bail!("m: {m} rows of {k} values are too many");
        };
        if self.blocks.len() < len {
            self.blocks.resize(len, Q8Block::ZERO);
        }
        (self.m, self.k, self.grain, self.filled) = (m, k, grain, len);
        self.forget();
        Ok(())
    }

    /// What was made of the rows, which are about to change.
    fn forget(&mut self) {
        #[cfg(target_arch = "x86_64")]
        {
            self.tables.1 = false;
            self.tiles.1 = false;
        }
    }

    /// A handle by which several threads can fill different rows at the same time, with scales and bits as
    /// they were last.
    pub fn rows_mut(&mut self) -> Q8Rows<'_> {
        self.forget();
        self.rows(false)
    }

    /// With `tiles` the processor has AVX-512 with bf16, and rows are written there, too.
    pub(super) fn rows(&mut self, tiles: bool) -> Q8Rows<'_> {
        let (m, k, parts) = (self.m, self.k, self.parts());
        #[cfg(target_arch = "x86_64")]
        {
            self.tiles.1 = tiles;
        }
        let _ = tiles;
        Q8Rows {
            first: self.blocks.as_mut_ptr(),
            #[cfg(target_arch = "x86_64")]
            tiles: tiles.then(|| self.tiles.0.prepare((m, k, parts))),
            m,
            blocks: parts * (k / 32),
            grain: self.grain,
            life: PhantomData,
        }
    }

    /// Number of tokens.
    pub fn m(&self) -> usize {
        self.m
    }

    /// Width of a token.
    pub fn k(&self) -> usize {
        self.k
    }

    /// How they were quantized.
    pub fn grain(&self) -> Grain {
        self.grain
    }

    /// Rows of blocks for each token.
    pub(super) fn parts(&self) -> usize {
        self.grain.parts()
    }

    /// The values that the codes of token `t` stand for.
    ///
    /// # Errors
    /// If there is no token `t`, or `out` does not have k values.
    pub fn dequantize_row(&self, t: usize, out: &mut [f32]) -> Result<()> {
        if t >= self.m {
            bail!("t: there is no token {t} among {}", self.m);
        }
        if out.len() != self.k {
            bail!("out: {} values given, expected k = {}", out.len(), self.k);
        }
        let blocks = self.k / 32;
        out.fill(0.);
        for part in
            self.blocks[t * self.parts() * blocks..][..self.parts() * blocks].chunks_exact(blocks)
        {
            for (block, out) in part.iter().zip(out.chunks_exact_mut(32)) {
                for (q, out) in block.q.iter().zip(out) {
                    *out += block.d * f32::from(*q);
                }
            }
        }
        Ok(())
    }

    pub(super) fn blocks(&self) -> &[Q8Block] {
        &self.blocks[..self.filled]
    }

    /// Bytes of its memory.
    pub(crate) fn bytes(&self) -> usize {
        let blocks = size_of::<Q8Block>() * self.blocks.capacity();
        #[cfg(target_arch = "x86_64")]
        let blocks = blocks + self.tiles.0.bytes();
        blocks
    }
}

thread_local! {
    /// The row in hand, kept from task to task.
    static MADE: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// Rows of `k` values that outweigh the hand-over of a task: about 16,000 values are 2 microseconds.
fn rows_of_a_task(k: usize) -> usize {
    (16_384 / k).max(1)
}

/// The rows of a [`Q8Activations`], to be filled from several threads.
pub struct Q8Rows<'a> {
    first: *mut Q8Block,
    #[cfg(target_arch = "x86_64")]
    tiles: Option<TokenRows<'a>>,
    m: usize,
    /// Of a token, in all its parts.
    blocks: usize,
    grain: Grain,
    life: PhantomData<&'a mut [Q8Block]>,
}

// SAFETY: it stands for a `&mut [Q8Block]`; shared access goes through `row`, whose caller keeps
// rows apart.
unsafe impl Send for Q8Rows<'_> {}
// SAFETY: as above.
unsafe impl Sync for Q8Rows<'_> {}

impl Q8Rows<'_> {
    /// Row `t`. Panics if there is none.
    ///
    /// # Safety
    /// While the result lives, no other call may have given the same row.
    pub unsafe fn row(&self, t: usize) -> Q8Row<'_> {
        assert!(t < self.m, "there is no token {t} among {}", self.m);
        // SAFETY: row t lies within the m x blocks that `first` points to, which are borrowed for
        // this handle's life; the caller keeps rows apart.
        let blocks =
            unsafe { std::slice::from_raw_parts_mut(self.first.add(t * self.blocks), self.blocks) };
        Q8Row {
            blocks,
            #[cfg(target_arch = "x86_64")]
            tiles: self.tiles.as_ref().map(|rows| (rows, t)),
            grain: self.grain,
        }
    }
}

/// One token's row of a [`Q8Activations`], to be filled.
pub struct Q8Row<'a> {
    /// In all parts.
    blocks: &'a mut [Q8Block],
    /// The rows of all tokens in tiles, and which is this token.
    #[cfg(target_arch = "x86_64")]
    tiles: Option<(&'a TokenRows<'a>, usize)>,
    grain: Grain,
}

impl Q8Row<'_> {
    /// Quantizes `x` into this row.
    ///
    /// # Errors
    /// If `x` does not have k values.
    pub fn quantize(&mut self, level: Level, x: &[f32]) -> Result<()> {
        let k = 32 * self.blocks.len() / self.grain.parts();
        if x.len() != k {
            bail!("x: {} values given, expected k = {k}", x.len());
        }
        self.quantize_at(level.supported(), x);
        Ok(())
    }

    /// As `quantize`, where the processor is known to have `level`.
    fn quantize_at(&mut self, level: Level, x: &[f32]) {
        match level {
            // SAFETY: the caller made sure that the processor has this level.
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 | Level::Avx512Bf16 | Level::Amx => unsafe {
                levels::avx512(x, self.blocks, self.grain)
            },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => unsafe { levels::avx2(x, self.blocks, self.grain) },
            _ => rounding::plain(x, self.blocks, self.grain),
        }
        #[cfg(target_arch = "x86_64")]
        if let Some((rows, token)) = self.tiles {
            let place = (token, self.grain.parts());
            // SAFETY: tiles are there only where the processor has AVX-512 with bf16, and this token is nobody else's.
            unsafe { amx::write_token(x, self.blocks, place, rows) };
        }
    }
}
