//! Four lanes in plain Rust, which compilers turn into SSE2 or NEON.

use super::Vector;
use half::{bf16, f16};

/// Four lanes.
#[derive(Clone, Copy)]
#[repr(align(16))]
pub struct Lanes4([f32; 4]);

#[inline(always)]
fn zip(a: Lanes4, b: Lanes4, f: impl Fn(f32, f32) -> f32) -> Lanes4 {
    Lanes4([
        f(a.0[0], b.0[0]),
        f(a.0[1], b.0[1]),
        f(a.0[2], b.0[2]),
        f(a.0[3], b.0[3]),
    ])
}

#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

impl Vector for Lanes4 {
    const LANES: usize = 4;
    const REGISTERS: usize = 16;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Self([x; 4])
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the caller lets four elements be read.
        Self(unsafe { p.cast::<[f32; 4]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const f16) -> Self {
        // SAFETY: the caller lets four elements be read.
        Self(unsafe { p.cast::<[f16; 4]>().read_unaligned() }.map(f16::to_f32))
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const bf16) -> Self {
        // SAFETY: the caller lets four elements be read.
        Self(unsafe { p.cast::<[bf16; 4]>().read_unaligned() }.map(bf16::to_f32))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: the caller lets four elements be written.
        unsafe { p.cast::<[f32; 4]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut f16) {
        // SAFETY: the caller lets four elements be written.
        unsafe {
            p.cast::<[f16; 4]>()
                .write_unaligned(self.0.map(f16::from_f32))
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut bf16) {
        // SAFETY: the caller lets four elements be written.
        unsafe {
            p.cast::<[bf16; 4]>()
                .write_unaligned(self.0.map(bf16::from_f32))
        }
    }

    #[inline(always)]
    fn fill(self, x: f32) -> Self {
        Self([x; 4])
    }
    #[inline(always)]
    fn add(self, o: Self) -> Self {
        zip(self, o, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, o: Self) -> Self {
        zip(self, o, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, o: Self) -> Self {
        zip(self, o, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, o: Self) -> Self {
        zip(self, o, |a, b| a / b)
    }
    #[inline(always)]
    fn mul_add(self, a: Self, b: Self) -> Self {
        // A fused multiply-add is a library call where the target has no instruction for it.
        if cfg!(any(target_arch = "aarch64", target_feature = "fma")) {
            let f = |i: usize| self.0[i].mul_add(a.0[i], b.0[i]);
            return Self([f(0), f(1), f(2), f(3)]);
        }
        self.mul(a).add(b)
    }
    #[inline(always)]
    fn min(self, o: Self) -> Self {
        zip(self, o, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn max(self, o: Self) -> Self {
        zip(self, o, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn round(self) -> Self {
        // Adding 1.5 * 2^23 leaves no fraction bits; larger values have none to begin with.
        const BIG: f32 = 12_582_912.0;
        Self(self.0.map(|x| {
            if x.abs() < 4_194_304.0 {
                (x + BIG) - BIG
            } else {
                x
            }
        }))
    }
    #[inline(always)]
    fn abs(self) -> Self {
        Self(self.0.map(f32::abs))
    }
    #[inline(always)]
    fn scale(self, n: Self) -> Self {
        zip(self, n, |x, n| {
            let n = n as i32;
            let half = n >> 1;
            x * power_of_two(half) * power_of_two(n - half)
        })
    }
    #[inline(always)]
    fn power_of_two(self) -> Self {
        Self(self.0.map(|x| f32::from_bits(x.to_bits() << 23)))
    }
    #[inline(always)]
    fn where_less(self, bound: Self, yes: Self, no: Self) -> Self {
        let f = |i: usize| {
            if self.0[i] < bound.0[i] {
                yes.0[i]
            } else {
                no.0[i]
            }
        };
        Self([f(0), f(1), f(2), f(3)])
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        (self.0[0] + self.0[2]) + (self.0[1] + self.0[3])
    }
    #[inline(always)]
    fn max_lane(self) -> f32 {
        self.0[0].max(self.0[2]).max(self.0[1].max(self.0[3]))
    }
    #[inline(always)]
    fn sum4(v: [Self; 4]) -> [f32; 4] {
        [v[0].sum(), v[1].sum(), v[2].sum(), v[3].sum()]
    }
}
