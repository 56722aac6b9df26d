//! Every op on random shapes, layouts, types and values against its plain form, on every device.
//!
//! Two things are asked of each: that finite values come out as the plain form has them, and that what
//! is no number (or the largest there is) stays in its row, or in its head for attention. Errors are
//! bounded by what was summed, so that no case fails by bad luck.
//!
//! `PROPTEST_CASES` is the number of cases of each property, 200 by default.

mod attention;
mod decoding;
mod norms;
mod paged;
mod products;
mod quantized;
mod rotary;
mod sampling;

use crate::support::devices;
use candle_core::{D, DType, Device, Result, Tensor};
use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

pub fn cases() -> ProptestConfig {
    let asked = std::env::var("PROPTEST_CASES").ok();
    let cases = asked.map_or(200, |n| n.parse().expect("PROPTEST_CASES: a number"));
    ProptestConfig {
        cases,
        failure_persistence: None,
        ..Default::default()
    }
}

/// How a tensor lies in memory.
#[derive(Clone, Copy, Debug)]
pub enum Lie {
    Dense,
    /// Cut out of a larger one along an axis.
    Cut(usize),
    /// Two axes are swapped.
    Swapped(usize, usize),
    /// Every other element.
    Strided,
    /// One and the same along an axis.
    Broadcast(usize),
}

pub fn lie() -> impl Strategy<Value = Lie> {
    prop_oneof![
        Just(Lie::Dense),
        (0usize..4).prop_map(Lie::Cut),
        (0usize..4, 0usize..4).prop_map(|(a, b)| Lie::Swapped(a, b)),
        Just(Lie::Strided),
        (0usize..4).prop_map(Lie::Broadcast),
    ]
}

/// The same with every element in a place of its own.
pub fn own_lie() -> impl Strategy<Value = Lie> {
    lie().prop_map(|lie| match lie {
        Lie::Broadcast(axis) => Lie::Cut(axis),
        lie => lie,
    })
}

impl Lie {
    /// `t` in this layout, on `device`, between values that are no numbers.
    pub fn place(self, t: &Tensor, device: &Device) -> Result<Tensor> {
        let t = t.to_device(device)?;
        let rank = t.rank();
        if rank == 0 {
            return Ok(t);
        }
        let junk = |dims: &[usize]| Tensor::ones(dims, t.dtype(), device)? * f64::NAN;
        match self {
            Lie::Dense => Ok(t),
            Lie::Cut(axis) => {
                let axis = axis % rank;
                let beside = |n: usize| {
                    let mut dims = t.dims().to_vec();
                    dims[axis] = n;
                    junk(&dims)
                };
                let length = t.dims()[axis];
                Tensor::cat(&[&beside(2)?, &t, &beside(1)?], axis)?.narrow(axis, 2, length)
            }
            Lie::Swapped(a, b) => {
                let swapped = t.transpose(a % rank, b % rank)?.contiguous()?;
                swapped.transpose(a % rank, b % rank)
            }
            Lie::Strided => {
                let pairs = Tensor::stack(&[&junk(t.dims())?, &t], D::Minus1)?;
                pairs.narrow(D::Minus1, 1, 1)?.squeeze(D::Minus1)
            }
            Lie::Broadcast(axis) if t.dims()[axis % rank] > 0 => {
                t.narrow(axis % rank, 0, 1)?.broadcast_as(t.dims())
            }
            Lie::Broadcast(_) => Ok(t),
        }
    }
}

/// The devices that take tensors of so many elements: candle copies none to a GPU.
pub fn devices_for(elements: usize) -> impl Iterator<Item = Device> {
    let all = devices().into_iter();
    all.filter(move |device| elements > 0 || device.is_cpu())
}

pub fn float() -> impl Strategy<Value = DType> {
    prop::sample::select(vec![DType::F32, DType::F16, DType::BF16])
}

/// Up to `most`, and now and then none.
pub fn length(most: usize) -> impl Strategy<Value = usize> {
    prop_oneof![1 => Just(0), 19 => 1..=most]
}

/// A power of two to multiply values by, tiny to huge, as far as the type reaches.
pub fn size(dtype: DType, exponent: i32) -> f64 {
    let exponent = match dtype {
        DType::F16 => exponent.rem_euclid(7) - 6,
        _ => exponent,
    };
    2f64.powi(exponent)
}

/// Uniform values in `-size..size`, on the CPU.
pub fn draw(rng: &mut StdRng, dims: &[usize], size: f64, dtype: DType) -> Result<Tensor> {
    let count = dims.iter().product();
    let values: Vec<f32> = (0..count)
        .map(|_| (rng.random_range(-1f64..1.) * size) as f32)
        .collect();
    Tensor::from_vec(values, dims, &Device::Cpu)?.to_dtype(dtype)
}

pub fn seeded(seed: u64) -> StdRng {
    StdRng::seed_from_u64(seed)
}

/// The distance of one and the next number of a type.
pub fn unit(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 1.2e-7,
        DType::F16 => 9.8e-4,
        _ => 7.9e-3,
    }
}

/// The largest magnitude.
pub fn top(values: &[f64]) -> f64 {
    values.iter().fold(0., |m, v| v.abs().max(m))
}

/// What stands in for one value: no number, or the largest.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Poison {
    Nan,
    Infinite(bool),
    Largest,
}

pub fn poison() -> impl Strategy<Value = Poison> {
    prop::sample::select(vec![
        Poison::Nan,
        Poison::Infinite(false),
        Poison::Infinite(true),
        Poison::Largest,
    ])
}

impl Poison {
    fn value(self, dtype: DType) -> f32 {
        match self {
            Poison::Nan => f32::NAN,
            Poison::Infinite(false) => f32::INFINITY,
            Poison::Infinite(true) => f32::NEG_INFINITY,
            Poison::Largest if dtype == DType::F16 => 65504.,
            Poison::Largest => 3.38e38,
        }
    }

    /// `t`, on the CPU, with this in place of element `at`, counted in row-major order.
    pub fn put(self, t: &Tensor, at: usize) -> Result<Tensor> {
        let mut values: Vec<f32> = t.flatten_all()?.to_dtype(DType::F32)?.to_vec1()?;
        values[at] = self.value(t.dtype());
        Tensor::from_vec(values, t.dims(), t.device())?.to_dtype(t.dtype())
    }

    /// Holds a result against the same without poison and against the plain form: outside of what the
    /// poison may reach nothing changes, and inside nothing looks like a number that is none.
    pub fn check(
        self,
        clean: &[f64],
        dirty: &[f64],
        expected: &[f64],
        reached: impl Fn(usize) -> bool,
    ) -> std::result::Result<(), TestCaseError> {
        prop_assert_eq!(clean.len(), dirty.len());
        prop_assert_eq!(dirty.len(), expected.len());
        for (i, (dirty, expected)) in dirty.iter().zip(expected).enumerate() {
            if !reached(i) {
                let same = dirty.to_bits() == clean[i].to_bits();
                prop_assert!(same, "{self:?} reached {i}: {} became {dirty}", clean[i]);
                continue;
            }
            let silent = match self {
                Poison::Nan => expected.is_nan() && !dirty.is_nan(),
                Poison::Infinite(_) => !expected.is_finite() && dirty.is_finite(),
                Poison::Largest => false,
            };
            prop_assert!(!silent, "{self:?} at {i}: {dirty}, expected {expected}");
        }
        Ok(())
    }
}

/// For bodies that give candle's errors inside of properties.
pub fn ok<T>(result: Result<T>) -> std::result::Result<T, TestCaseError> {
    result.map_err(|e| TestCaseError::fail(e.to_string()))
}
