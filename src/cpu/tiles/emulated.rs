//! Tiles in plain Rust, for unit tests on processors without AMX.

use super::amx::{Amx, Config, TileOps};
use super::{ROW_BYTES, ROWS};
use crate::cpu::simd::{self, Level};
use half::bf16;
use std::cell::RefCell;

/// The instructions where the processor has them, else their emulation.
pub(in crate::cpu) struct Tiles;

impl Tiles {
    /// Whether this thread has left emulated tiles configured.
    pub fn in_use() -> bool {
        STATE.with_borrow(|state| state.shapes.is_some())
    }
}

type Tile = [[u8; ROW_BYTES]; ROWS];

/// The tiles of a thread, of which `shapes` are (rows, bytes of a row); none if they are not configured.
struct State {
    shapes: Option<[(usize, usize); 8]>,
    tiles: [Tile; 8],
}

thread_local! {
    static STATE: RefCell<State> = const {
        RefCell::new(State { shapes: None, tiles: [[[0; ROW_BYTES]; ROWS]; 8] })
    };
}

impl State {
    fn configure(&mut self, config: &Config) {
        let shape = |i: usize| (config.rows[i].into(), config.row_bytes[i].into());
        self.shapes = (!config.is_none()).then(|| std::array::from_fn(shape));
        self.tiles = [[[0; ROW_BYTES]; ROWS]; 8];
    }

    fn shape(&self, tile: u8) -> (usize, usize) {
        self.shapes.expect("tiles are configured")[usize::from(tile)]
    }

    /// `C[m][n] += sum` of the products of row m of A and column n of B, where a column is two numbers of each row.
    fn dot_bf16(&mut self, [c, a, b]: [u8; 3]) {
        let (rows, bytes) = self.shape(c);
        let (a_rows, a_bytes) = self.shape(a);
        assert_eq!((rows, a_bytes / 4), (a_rows, self.shape(b).0));
        assert_eq!(bytes, self.shape(b).1);
        let [a, b] = [a, b].map(|tile| self.tiles[usize::from(tile)]);
        let pair = |tile: &Tile, row: usize, i: usize| {
            let [low, high, low_1, high_1] = *word(&tile[row], i);
            [[low, high], [low_1, high_1]].map(|x| bf16::from_le_bytes(x).to_f32())
        };
        for (m, row) in self.tiles[usize::from(c)][..rows].iter_mut().enumerate() {
            for n in 0..bytes / 4 {
                let mut sum = f32::from_le_bytes(*word(row, n));
                for i in 0..a_bytes / 4 {
                    let (a, b) = (pair(&a, m, i), pair(&b, i, n));
                    sum += a[0] * b[0];
                    sum += a[1] * b[1];
                }
                row[4 * n..][..4].copy_from_slice(&sum.to_le_bytes());
            }
        }
    }
}

/// Word `i` of a tile's row.
fn word(row: &[u8; ROW_BYTES], i: usize) -> &[u8; 4] {
    &row.as_chunks().0[i]
}

fn emulate<R>(f: impl FnOnce(&mut State) -> R) -> R {
    STATE.with_borrow_mut(f)
}

fn real() -> bool {
    simd::best() == Level::Amx
}

impl TileOps for Tiles {
    unsafe fn configure(config: &Config) -> Config {
        if real() {
            // SAFETY: the processor has AMX.
            return unsafe { Amx::configure(config) };
        }
        emulate(|state| {
            let before = state.shapes.map_or(Config::NONE, Config::new);
            state.configure(config);
            before
        })
    }

    unsafe fn release(before: &Config) {
        if real() {
            // SAFETY: the processor has AMX.
            return unsafe { Amx::release(before) };
        }
        emulate(|state| state.configure(before));
    }

    unsafe fn zero<const T: u8>() {
        if real() {
            // SAFETY: the caller's.
            return unsafe { Amx::zero::<T>() };
        }
        emulate(|state| {
            state.shape(T);
            state.tiles[usize::from(T)] = [[0; ROW_BYTES]; ROWS];
        });
    }

    unsafe fn load<const T: u8>(p: *const u8, stride: usize) {
        if real() {
            // SAFETY: the caller's.
            return unsafe { Amx::load::<T>(p, stride) };
        }
        emulate(|state| {
            let (rows, bytes) = state.shape(T);
            for (row, to) in state.tiles[usize::from(T)][..rows].iter_mut().enumerate() {
                // SAFETY: readable, by the trait's contract.
                let from = unsafe { std::slice::from_raw_parts(p.add(row * stride), bytes) };
                to[..bytes].copy_from_slice(from);
            }
        });
    }

    unsafe fn store<const T: u8>(p: *mut u8, stride: usize) {
        if real() {
            // SAFETY: the caller's.
            return unsafe { Amx::store::<T>(p, stride) };
        }
        emulate(|state| {
            let (rows, bytes) = state.shape(T);
            for (row, from) in state.tiles[usize::from(T)][..rows].iter().enumerate() {
                // SAFETY: writable, by the trait's contract.
                unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), p.add(row * stride), bytes) };
            }
        });
    }

    /// In an order of its own: the processor's sums differ in the last bits.
    unsafe fn dot_bf16<const C: u8, const A: u8, const B: u8>() {
        if real() {
            // SAFETY: the caller's.
            return unsafe { Amx::dot_bf16::<C, A, B>() };
        }
        emulate(|state| state.dot_bf16([C, A, B]));
    }
}

#[test]
fn a_configuration_of_somebody_else_is_given_back() {
    use super::product::Multiply;
    let theirs = Config::new([(ROWS, 32); 8]);
    // SAFETY: emulated, or the processor has tiles; each configuration is released in this thread.
    let (none, again) = unsafe {
        let none = Tiles::configure(&theirs);
        Tiles::end(Tiles::begin());
        let again = Tiles::configure(&theirs);
        Tiles::release(&none);
        (none, again)
    };
    assert!(none.is_none() && !Tiles::in_use());
    assert_eq!(
        (again.rows, again.row_bytes),
        (theirs.rows, theirs.row_bytes)
    );
}
