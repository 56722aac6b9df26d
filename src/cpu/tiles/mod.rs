//! Products of bf16 in tiles of 16 rows of 64 bytes, the operands of Intel AMX.
//!
//! Tokens are put into tiles once ([`tokens`]), weights 32 rows at a time where they are needed ([`product`]). What
//! multiplies them is AMX ([`amx`]) or, where there is none, AVX-512's products of bf16 ([`vectors`]).

pub(super) mod amx;
#[cfg(test)]
mod emulated;
pub(super) mod product;
pub(super) mod tokens;
pub(super) mod vectors;

/// AMX; in unit tests on a processor without it an emulation.
#[cfg(not(test))]
pub(super) type Tiles = amx::Amx;
#[cfg(test)]
pub(super) use emulated::Tiles;

/// Rows of a whole tile.
pub(super) const ROWS: usize = 16;
/// Bytes of a row of a whole tile.
pub(super) const ROW_BYTES: usize = 64;
/// Numbers in bf16 of a tile's row: columns of a product that are multiplied at once.
pub(super) const STEP: usize = ROW_BYTES / size_of::<u16>();

/// A row of a tile.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(super) struct Row(pub [u16; STEP]);

/// A tile of operands.
pub(super) type Tile = [Row; ROWS];

/// A tile of zeros.
pub(super) const ZEROS: Tile = [Row([0; STEP]); ROWS];
