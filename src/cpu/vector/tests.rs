//! Each vector's methods against plain f32 arithmetic.

use super::*;

const SPECIAL: [f32; 16] = [
    0.0,
    -0.0,
    1.0,
    -1.5,
    2.5,
    3.5,
    -0.5,
    0.49999997,
    1e-40,
    -3e-45,
    65504.0,
    70000.0,
    3.4e38,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
];

fn same(a: f32, b: f32) -> bool {
    a == b || (a.is_nan() && b.is_nan())
}

struct Elementwise;
impl Kernel for Elementwise {
    type Output = ();
    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        for start in (0..16).step_by(V::LANES) {
            let x = &SPECIAL[start..start + V::LANES];
            let mut out = [0f32; 16];
            let (mut half, mut brain) = ([f16::ZERO; 16], [bf16::ZERO; 16]);
            let mut again = [[0f32; 16]; 2];
            // SAFETY: every array has at least `LANES` elements.
            unsafe {
                let v = V::load(x.as_ptr());
                v.round().store(out.as_mut_ptr());
                v.store_f16(half.as_mut_ptr());
                v.store_bf16(brain.as_mut_ptr());
                V::load_f16(half.as_ptr()).store(again[0].as_mut_ptr());
                V::load_bf16(brain.as_ptr()).store(again[1].as_mut_ptr());
            }
            for (i, x) in x.iter().enumerate() {
                assert!(same(out[i], x.round_ties_even()), "round({x}) = {}", out[i]);
                assert!(same(again[0][i], f16::from_f32(*x).to_f32()), "f16({x})");
                assert!(same(again[1][i], bf16::from_f32(*x).to_f32()), "bf16({x})");
            }
            // SAFETY: as above.
            unsafe {
                let (v, one, two) = (V::load(x.as_ptr()), V::splat(1.0), V::splat(2.0));
                v.where_less(one, one, two).store(out.as_mut_ptr());
                one.max(v).store(again[0].as_mut_ptr());
                one.min(v).store(again[1].as_mut_ptr());
            }
            for (i, x) in x.iter().enumerate() {
                assert_eq!(out[i], if *x < 1.0 { 1.0 } else { 2.0 }, "{x} < 1");
                assert!(
                    same(again[0][i], if x.is_nan() { *x } else { x.max(1.0) }),
                    "max {x}"
                );
                assert!(
                    same(again[1][i], if x.is_nan() { *x } else { x.min(1.0) }),
                    "min {x}"
                );
            }
        }
    }
}

struct Reductions;
impl Kernel for Reductions {
    type Output = ();
    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let x: [f32; 64] = std::array::from_fn(|i| (i * i % 37) as f32 - 9.0);
        // SAFETY: four vectors of at most 16 lanes.
        let v = unsafe { [0, 1, 2, 3].map(|i| V::load(x.as_ptr().add(i * V::LANES))) };
        let part = |i: usize| &x[i * V::LANES..(i + 1) * V::LANES];
        let sums = V::sum4(v);
        for i in 0..4 {
            assert_eq!(sums[i], part(i).iter().sum::<f32>());
            assert_eq!(v[i].sum(), sums[i]);
            assert_eq!(
                v[i].max_lane(),
                part(i).iter().copied().fold(f32::MIN, f32::max)
            );
        }
    }
}

struct Scale;
impl Kernel for Scale {
    type Output = ();
    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        for n in -160..=130 {
            let mut out = [0f32; 16];
            // SAFETY: no vector has more than 16 lanes.
            unsafe {
                V::splat(1.25)
                    .scale(V::splat(n as f32))
                    .store(out.as_mut_ptr())
            }
            assert_eq!(out[0], (1.25 * 2f64.powi(n)) as f32, "1.25 * 2^{n}");
            if (-126..=127).contains(&n) {
                // SAFETY: as above.
                unsafe {
                    V::splat(BIASED + n as f32)
                        .power_of_two()
                        .store(out.as_mut_ptr())
                }
                assert_eq!(out[0], 2f32.powi(n));
            }
        }
    }
}

struct Convert<'a, T>(&'a [f32], &'a mut [T], &'a mut [f32]);
impl<T: Element> Kernel for Convert<'_, T> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        // SAFETY: the three slices have one length.
        unsafe {
            narrow::<V, T>(self.0.as_ptr(), self.1.as_mut_ptr(), self.0.len());
            widen::<V, T>(self.1.as_ptr(), 1, self.2.as_mut_ptr(), self.0.len());
        }
    }
}

#[test]
fn every_level_computes_like_plain_rust() {
    for level in Level::available() {
        // SAFETY: these kernels hold no pointers of the caller's.
        unsafe {
            dispatch(level, Elementwise);
            dispatch(level, Reductions);
            dispatch(level, Scale);
        }
    }
}

#[test]
fn conversions_round_to_nearest_even_at_any_length() {
    for level in Level::available() {
        for len in [0, 1, 5, 8, 19, 64] {
            let x: Vec<f32> = (0..len).map(|i| (i as f32 + 0.3) * 1.0173).collect();
            let (mut half, mut brain) = (vec![f16::ZERO; len], vec![bf16::ZERO; len]);
            let mut back = vec![0f32; len];
            // SAFETY: the slices have one length.
            unsafe { dispatch(level, Convert(&x, &mut half, &mut back)) }
            assert!(
                x.iter()
                    .zip(&back)
                    .all(|(a, b)| f16::from_f32(*a).to_f32() == *b)
            );
            // SAFETY: the slices have one length.
            unsafe { dispatch(level, Convert(&x, &mut brain, &mut back)) }
            assert!(
                x.iter()
                    .zip(&back)
                    .all(|(a, b)| bf16::from_f32(*a).to_f32() == *b)
            );
        }
    }
}
