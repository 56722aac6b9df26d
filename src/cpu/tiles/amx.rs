//! Intel AMX: eight tile registers of up to 16 rows of 64 bytes, and products of them.
//!
//! Rust has no stable intrinsics for it, so the instructions are assembly. The compiler knows nothing of tiles and
//! never touches them: they keep what one block of assembly leaves for the next. A thread configures them, works,
//! and releases them, as tiles in use cost every context switch 8 KB. If somebody else had configured them, it gives that
//! configuration back: candle 0.11's product for Q4_K configures a thread once, and would end with an illegal
//! instruction, or multiply other shapes, the next time.

use super::product::{Multiply, Sums, Weights};
use super::{ROW_BYTES, ROWS, Tile};
use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};

/// The shapes of tiles, as `ldtilecfg` reads them.
#[repr(C, align(64))]
pub(in crate::cpu) struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    pub(super) row_bytes: [u16; 16],
    pub(super) rows: [u8; 16],
}

impl Config {
    /// Of a thread that has configured no tiles.
    pub const NONE: Self = Self {
        palette: 0,
        start_row: 0,
        reserved: [0; 14],
        row_bytes: [0; 16],
        rows: [0; 16],
    };

    pub fn is_none(&self) -> bool {
        self.palette == 0
    }

    /// Tile `i` with `shapes[i]` = (rows, bytes of a row).
    pub const fn new(shapes: [(usize, usize); 8]) -> Self {
        let mut this = Self::NONE;
        this.palette = 1;
        let mut i = 0;
        while i < shapes.len() {
            let (rows, bytes) = shapes[i];
            assert!(rows <= ROWS && bytes <= ROW_BYTES);
            (this.rows[i], this.row_bytes[i]) = (rows as u8, bytes as u16);
            i += 1;
        }
        this
    }
}

/// Operations on tiles, which are named by number.
///
/// # Safety
/// All need a processor that has AMX for this process ([`available`]), all but `configure` a configuration in this
/// thread in which the shapes of their tiles fit, and memory that is good for the rows that they read or write.
pub(super) trait TileOps {
    /// Gives the tiles their shapes and zeroes them. Returns the configuration that the thread had.
    unsafe fn configure(config: &Config) -> Config;
    /// Gives the thread a configuration back that it had, with tiles that are zero; or ends the use of tiles.
    unsafe fn release(before: &Config);
    /// Tile T = 0.
    unsafe fn zero<const T: u8>();
    /// Tile T = the rows at `p`, `stride` bytes apart.
    unsafe fn load<const T: u8>(p: *const u8, stride: usize);
    /// Writes the rows of tile T to `p`, `stride` bytes apart.
    unsafe fn store<const T: u8>(p: *mut u8, stride: usize);
    /// `C[m][n] += sum over k of A[m][k] B[k / 2][2 n + k % 2]` in f32, with A and B in bf16.
    unsafe fn dot_bf16<const C: u8, const A: u8, const B: u8>();
}

/// The instructions.
pub(in crate::cpu) struct Amx;

impl TileOps for Amx {
    #[inline(always)]
    unsafe fn configure(config: &Config) -> Config {
        let mut before = Config::NONE;
        // SAFETY: AMX, by the trait's contract; a configuration has the 64 bytes that are written.
        unsafe {
            asm!("sttilecfg [{before}]", "ldtilecfg [{config}]", before = in(reg) &raw mut before,
                config = in(reg) config, options(nostack, preserves_flags));
        }
        before
    }
    #[inline(always)]
    unsafe fn release(before: &Config) {
        // SAFETY: AMX, by the trait's contract; the configuration is one that the processor has stored.
        unsafe {
            if before.is_none() {
                asm!("tilerelease", options(nostack, preserves_flags));
            } else {
                asm!("ldtilecfg [{}]", in(reg) before, options(nostack, preserves_flags));
            }
        }
    }
    #[inline(always)]
    unsafe fn zero<const T: u8>() {
        // SAFETY: AMX and a configured tile, by the trait's contract.
        unsafe { asm!("tilezero tmm{t}", t = const T, options(nomem, nostack, preserves_flags)) }
    }
    #[inline(always)]
    unsafe fn load<const T: u8>(p: *const u8, stride: usize) {
        // SAFETY: AMX, a configured tile and readable rows, by the trait's contract.
        unsafe {
            asm!("tileloadd tmm{t}, [{p} + {s}*1]", t = const T, p = in(reg) p, s = in(reg) stride,
                options(readonly, nostack, preserves_flags));
        }
    }
    #[inline(always)]
    unsafe fn store<const T: u8>(p: *mut u8, stride: usize) {
        // SAFETY: AMX, a configured tile and writable rows, by the trait's contract.
        unsafe {
            asm!("tilestored [{p} + {s}*1], tmm{t}", t = const T, p = in(reg) p, s = in(reg) stride,
                options(nostack, preserves_flags));
        }
    }
    #[inline(always)]
    unsafe fn dot_bf16<const C: u8, const A: u8, const B: u8>() {
        // SAFETY: AMX-BF16 and configured tiles, by the trait's contract.
        unsafe {
            asm!("tdpbf16ps tmm{c}, tmm{a}, tmm{b}", c = const C, a = const A, b = const B,
                options(nomem, nostack, preserves_flags));
        }
    }
}

impl<O: TileOps> Multiply for O {
    type Before = Config;

    #[inline(always)]
    unsafe fn begin() -> Config {
        const CONFIG: Config = Config::new([(ROWS, ROW_BYTES); 8]);
        // SAFETY: AMX, by the caller.
        unsafe { O::configure(&CONFIG) }
    }

    #[inline(always)]
    unsafe fn end(before: Config) {
        // SAFETY: AMX, by the caller.
        unsafe { O::release(&before) };
    }

    #[inline(always)]
    unsafe fn block<W: Weights>(
        [first, second]: [&[Tile]; 2],
        _: usize,
        parts: usize,
        weights: &[[Tile; 2]],
        sums: &mut [[Sums; 2]; 2],
    ) {
        debug_assert!(first.len() * W::PARTS == parts * weights.len());
        debug_assert!(second.is_empty() || second.len() == first.len());
        // SAFETY: all tiles are configured as whole ones, by `begin`, and all operands are whole tiles.
        unsafe {
            O::zero::<0>();
            O::zero::<1>();
            O::zero::<2>();
            O::zero::<3>();
            for (i, w) in weights.iter().enumerate() {
                let (step, part_of_w) = (i / W::PARTS, i % W::PARTS);
                O::load::<6>((&raw const w[0]).cast(), ROW_BYTES);
                O::load::<7>((&raw const w[1]).cast(), ROW_BYTES);
                for part in step * parts..(step + 1) * parts - part_of_w {
                    O::load::<4>((&raw const first[part]).cast(), ROW_BYTES);
                    O::dot_bf16::<0, 4, 6>();
                    O::dot_bf16::<1, 4, 7>();
                    if let Some(second) = second.get(part) {
                        O::load::<5>((&raw const *second).cast(), ROW_BYTES);
                        O::dot_bf16::<2, 5, 6>();
                        O::dot_bf16::<3, 5, 7>();
                    }
                }
            }
            O::store::<0>((&raw mut sums[0][0]).cast(), ROW_BYTES);
            O::store::<1>((&raw mut sums[0][1]).cast(), ROW_BYTES);
            O::store::<2>((&raw mut sums[1][0]).cast(), ROW_BYTES);
            O::store::<3>((&raw mut sums[1][1]).cast(), ROW_BYTES);
        }
    }
}

/// Whether the processor has tiles with products of bf16, and this process may use them. Linux
/// reserves memory for tiles only in processes that have requested it, for all their threads; the request is made here.
///
/// The processor must have AVX.
pub(in crate::cpu) fn available() -> bool {
    /// AMX-BF16 and AMX-TILE in EDX of leaf 7.
    const FEATURES: u32 = 1 << 22 | 1 << 24;
    /// The states of tiles' shapes and contents in XCR0.
    const STATES: u64 = 1 << 17 | 1 << 18;
    if !cfg!(target_os = "linux") {
        return false;
    }
    let (leaves, features) = (__cpuid(0).eax, __cpuid_count(7, 0).edx);
    // SAFETY: a processor with AVX that the system has enabled has xgetbv.
    let states = unsafe { _xgetbv(0) };
    leaves >= 7 && features & FEATURES == FEATURES && states & STATES == STATES && permitted()
}

/// Asks Linux for tiles: `arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)`. Kernels before 5.16 know no such thing
/// and refuse; so does any where a thread's signal stack is too small for the tiles.
fn permitted() -> bool {
    const ARCH_PRCTL: usize = 158;
    const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
    const XFEATURE_XTILEDATA: usize = 18;
    let result: isize;
    // SAFETY: this is Linux, and the call changes nothing but a permission; `syscall` overwrites rcx and r11.
    unsafe {
        asm!("syscall", inout("rax") ARCH_PRCTL => result, in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_XTILEDATA, lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    result == 0
}
