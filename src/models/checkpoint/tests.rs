//! Unpacking against plain packers, and what becomes of the numbers.

use super::gptq::Zeros;
use super::packing::Packing;
use super::tensors::Tensors;
use super::unpacked::{Target, Unpacked};
use crate::nn::LinearWeight;
use crate::nn::pack::dense;
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;
use half::f16;
use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::collections::HashMap;

/// A matrix of any codes, scales that are f16 and, perhaps, zero points and groups out of order.
fn matrix(
    seed: u64,
    bits: u32,
    (rows, cols): (usize, usize),
    groups: usize,
    more: More,
) -> Unpacked {
    let mut rng = StdRng::seed_from_u64(seed);
    let top = ((1u32 << bits) - 1) as u8;
    let scale = |rng: &mut StdRng| f16::from_f32(rng.random_range(-0.1f32..0.1)).to_f32();
    // A zero point in the middle of the range for all is what none stands for.
    let zero = |rng: &mut StdRng| rng.random_range(more.lowest..1 << (bits - 1));
    let mut of: Vec<i32> = (0..cols).map(|k| (k / (cols / groups)) as i32).collect();
    for at in (1..cols).rev() {
        of.swap(at, rng.random_range(0..=at));
    }
    Unpacked {
        rows,
        cols,
        bits,
        codes: (0..rows * cols)
            .map(|_| rng.random_range(0..=top))
            .collect(),
        scales: (0..rows * groups).map(|_| scale(&mut rng)).collect(),
        zeros: more
            .zeros
            .then(|| (0..rows * groups).map(|_| zero(&mut rng)).collect()),
        groups: more.shuffled.then_some(of),
    }
}

#[derive(Clone, Copy, Debug)]
struct More {
    zeros: bool,
    shuffled: bool,
    /// The least zero point.
    lowest: u8,
}

fn words(values: Vec<u32>, shape: (usize, usize)) -> Tensor {
    let values: Vec<i32> = values.into_iter().map(|w| w as i32).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

/// Bit by bit: `field(n, k)` is the word and the place in it of code (n, k).
fn packed(
    codes: &[u8],
    (rows, cols): (usize, usize),
    bits: u32,
    (height, width): (usize, usize),
    field: impl Fn(usize, usize) -> (usize, usize, u32),
) -> Tensor {
    let mut out = vec![0u32; height * width];
    for n in 0..rows {
        for k in 0..cols {
            let (row, col, place) = field(n, k);
            out[row * width + col] |= u32::from(codes[n * cols + k]) << (place * bits);
        }
    }
    words(out, (height, width))
}

fn floats(values: &[f32], shape: (usize, usize)) -> Tensor {
    let values = values.iter().map(|v| f16::from_f32(*v)).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

/// On the host, in f32.
fn to(fused: bool) -> Target<'static> {
    Target {
        device: &Device::Cpu,
        dtype: DType::F32,
        fused,
    }
}

type Parts = Vec<(&'static str, Tensor)>;

fn gptq(m: &Unpacked, less: u8) -> Parts {
    let (n, k, per) = (m.rows, m.cols, (32 / m.bits) as usize);
    let groups = m.scales.len() / n;
    let middle = 1u8 << (m.bits - 1);
    let zeros = m.zeros.clone().unwrap_or(vec![middle; n * groups]);
    let zeros: Vec<u8> = zeros.iter().map(|z| z - less).collect();
    let mut parts = vec![
        (
            "qweight",
            packed(&m.codes, (n, k), m.bits, (k / per, n), |n, k| {
                (k / per, n, (k % per) as u32)
            }),
        ),
        (
            "qzeros",
            packed(&zeros, (n, groups), m.bits, (groups, n / per), |n, g| {
                (g, n / per, (n % per) as u32)
            }),
        ),
        ("scales", floats(&m.scales, (n, groups)).t().unwrap()),
    ];
    if let Some(groups) = &m.groups {
        parts.push((
            "g_idx",
            Tensor::new(groups.as_slice(), &Device::Cpu).unwrap(),
        ));
    }
    parts
}

fn awq(m: &Unpacked) -> Parts {
    const ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
    let field = |n: usize, k: usize| {
        let place = ORDER.iter().position(|row| *row == n % 8).unwrap();
        (k, n / 8, place as u32)
    };
    let (n, k) = (m.rows, m.cols);
    let groups = m.scales.len() / n;
    let zeros = m.zeros.as_ref().expect("AWQ has zero points");
    vec![
        ("qweight", packed(&m.codes, (n, k), 4, (k, n / 8), field)),
        (
            "qzeros",
            packed(zeros, (n, groups), 4, (groups, n / 8), field),
        ),
        ("scales", floats(&m.scales, (n, groups)).t().unwrap()),
    ]
}

fn pack_quantized(m: &Unpacked) -> Parts {
    let (n, k, per) = (m.rows, m.cols, (32 / m.bits) as usize);
    let groups = m.scales.len() / n;
    let mut parts = vec![
        (
            "weight_packed",
            packed(&m.codes, (n, k), m.bits, (n, k.div_ceil(per)), |n, k| {
                (n, k / per, (k % per) as u32)
            }),
        ),
        ("weight_scale", floats(&m.scales, (n, groups))),
    ];
    if let Some(zeros) = &m.zeros {
        parts.push((
            "weight_zero_point",
            packed(
                zeros,
                (n, groups),
                m.bits,
                (n.div_ceil(per), groups),
                |n, g| (n / per, g, (n % per) as u32),
            ),
        ));
    }
    if let Some(groups) = &m.groups {
        parts.push((
            "weight_g_idx",
            Tensor::new(groups.as_slice(), &Device::Cpu).unwrap(),
        ));
    }
    parts
}

fn int_quantized(m: &Unpacked) -> Parts {
    let bytes = m.codes.iter().map(|q| q ^ 0x80).collect();
    let groups = m.scales.len() / m.rows;
    vec![
        (
            "weight",
            Tensor::from_vec(bytes, (m.rows, m.cols), &Device::Cpu).unwrap(),
        ),
        ("weight_scale", floats(&m.scales, (m.rows, groups))),
    ]
}

fn read(parts: Parts, packing: Packing, size: (usize, usize)) -> Result<Unpacked> {
    let named = |(part, tensor)| (format!("layer.{part}"), tensor);
    let tensors: HashMap<_, _> = parts.into_iter().map(named).collect();
    let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
    packing.codes(&Tensors::new(&vb, "layer"), size)
}

/// By the definition: what a format reads has to be worth this.
fn worth(m: &Unpacked) -> Vec<f32> {
    let groups = m.scales.len() / m.rows;
    let value = |n: usize, k: usize| {
        let g = match &m.groups {
            Some(groups) => groups[k] as usize,
            None => k / (m.cols / groups),
        };
        let middle = 1u8 << (m.bits - 1);
        let zero = m.zeros.as_ref().map_or(middle, |z| z[n * groups + g]);
        let q = i32::from(m.codes[n * m.cols + k]) - i32::from(zero);
        m.scales[n * groups + g] * q as f32
    };
    (0..m.rows)
        .flat_map(|n| (0..m.cols).map(move |k| (n, k)))
        .map(|(n, k)| value(n, k))
        .collect()
}

/// The weight in the crate's own format, and as numbers, has the values of the definition to the bit.
fn check_values(m: &Unpacked) {
    let expected: Vec<u32> = worth(m).iter().map(|v| v.to_bits()).collect();
    let fused = match m.clone().into_weight(None, to(true)).unwrap() {
        LinearWeight::Packed(weight) => dense(&weight).unwrap(),
        LinearWeight::Reordered(weight, order) => order.restore(&dense(&weight).unwrap()).unwrap(),
        other => panic!("{other:?}, expected a packed weight"),
    };
    let LinearWeight::Dense(plain) = m.clone().into_weight(None, to(false)).unwrap() else {
        panic!("expected numbers");
    };
    for values in [fused, plain] {
        let values: Vec<f32> = values.flatten_all().unwrap().to_vec1().unwrap();
        // Of zeros the sign is free.
        let bits = values.iter().map(|v| (v + 0.).to_bits());
        let expected = expected.iter().map(|b| (f32::from_bits(*b) + 0.).to_bits());
        assert!(bits.eq(expected));
    }
}

fn sizes() -> impl Strategy<Value = ((usize, usize), usize)> {
    let groups = prop_oneof![Just(32usize), Just(64), Just(128), Just(96), Just(256)];
    (1usize..20, groups, 1usize..4).prop_map(|(eights, group, n)| ((8 * eights, n * group), n))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(60) })]

    #[test]
    fn gptq_is_unpacked(
        (size, groups) in sizes(), seed: u64, eight: bool, zeros: bool, shuffled: bool, second: bool
    ) {
        let (bits, less) = (if eight { 8 } else { 4 }, u8::from(!second));
        let m = matrix(seed, bits, size, groups, More { zeros, shuffled, lowest: less });
        let stored = if second { Zeros::AsTheyAre } else { Zeros::LessOne };
        let got = read(gptq(&m, less), Packing::Gptq(stored), size).unwrap();
        prop_assert_eq!(&got, &m);
        if !(eight && zeros) {
            check_values(&got);
        }
    }

    #[test]
    fn awq_is_unpacked((size, groups) in sizes(), seed: u64) {
        let more = More { zeros: true, shuffled: false, lowest: 0 };
        let m = matrix(seed, 4, size, groups, more);
        let got = read(awq(&m), Packing::Awq, size).unwrap();
        prop_assert_eq!(&got, &m);
        check_values(&got);
    }

    #[test]
    fn compressed_tensors_are_unpacked(
        (size, groups) in sizes(), odd in 0usize..8, seed: u64, eight: bool, zeros: bool, shuffled: bool
    ) {
        // Rows need not fill the words of zero points.
        let size = (size.0 - odd, size.1);
        let m = matrix(seed, if eight { 8 } else { 4 }, size, groups, More { zeros, shuffled, lowest: 0 });
        let got = read(pack_quantized(&m), Packing::PackQuantized, size).unwrap();
        prop_assert_eq!(&got, &m);
        if !(eight && zeros) {
            check_values(&got);
        }
        if eight && !zeros && !shuffled {
            let got = read(int_quantized(&m), Packing::IntQuantized, size).unwrap();
            prop_assert_eq!(&got, &m);
        }
    }

    /// Tensors of any shape are an error or a matrix, and no panic.
    #[test]
    fn no_shape_makes_it_panic(
        shapes in proptest::collection::vec(proptest::collection::vec(0usize..40, 0..4), 5),
        size in (1usize..40, 1usize..80),
        seed: u64,
    ) {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut tensor = |shape: &Vec<usize>| {
            let count = shape.iter().product::<usize>();
            let values = (0..count).map(|_| rng.random_range(-9i32..9)).collect();
            Tensor::from_vec(values, shape.as_slice(), &Device::Cpu).unwrap()
        };
        let tensors: Vec<_> = shapes.iter().map(&mut tensor).collect();
        for (packing, names) in [
            (Packing::Gptq(Zeros::LessOne), ["qweight", "qzeros", "scales", "g_idx", "-"]),
            (Packing::Awq, ["qweight", "qzeros", "scales", "-", "-"]),
            (
                Packing::PackQuantized,
                ["weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "-"],
            ),
            (Packing::IntQuantized, ["weight", "weight_scale", "weight_zero_point", "-", "-"]),
        ] {
            let parts = names.into_iter().zip(tensors.clone()).collect();
            if let Ok(m) = read(parts, packing, size) {
                for heads in [None, Some(2)] {
                    let _ = m.clone().into_weight(heads, to(true));
                }
            }
        }
    }
}

#[test]
fn symmetric_weights_are_known_by_their_zero_points() {
    let size = (16, 64);
    let more = More {
        zeros: false,
        shuffled: false,
        lowest: 0,
    };
    let m = matrix(1, 4, size, 2, more);
    // Version 1 stores 7, some files of it 8, version 2 stores 8.
    for (less, stored) in [
        (1, Zeros::LessOne),
        (0, Zeros::LessOne),
        (0, Zeros::AsTheyAre),
        (1, Zeros::Unknown),
    ] {
        let got = read(gptq(&m, less), Packing::Gptq(stored), size).unwrap();
        assert_eq!(got, m, "{less} {stored:?}");
    }
}

/// GPTQModel takes ones off whole words, so that a zero point of 0 borrows from its neighbour.
#[test]
fn zero_points_of_zero_are_paid_back() {
    let size = (16, 32);
    let more = More {
        zeros: true,
        shuffled: false,
        lowest: 0,
    };
    let mut m = matrix(2, 4, size, 1, more);
    m.zeros = Some((0..16).map(|n| [0, 5, 0, 0, 15, 1, 0, 9][n % 8]).collect());
    let mut parts = gptq(&m, 0);
    let zeros: Vec<i32> = parts[1].1.flatten_all().unwrap().to_vec1().unwrap();
    let less = zeros
        .iter()
        .map(|w| (*w as u32).wrapping_sub(0x1111_1111))
        .collect();
    parts[1].1 = words(less, (1, 2));
    assert_eq!(read(parts, Packing::Gptq(Zeros::LessOne), size).unwrap(), m);
}

#[test]
fn rows_of_heads_are_put_apart() {
    let size = (24, 32);
    let more = More {
        zeros: true,
        shuffled: true,
        lowest: 0,
    };
    let m = matrix(3, 4, size, 1, more);
    let dense = |m: Unpacked, heads| match m.into_weight(heads, to(false)).unwrap() {
        LinearWeight::Dense(values) => values,
        other => panic!("{other:?}"),
    };
    let expected = crate::models::weights::arranged(dense(m.clone(), None), Some(4)).unwrap();
    let got = dense(m.clone(), Some(4));
    let rows = |t: &Tensor| t.to_vec2::<f32>().unwrap();
    assert_eq!(rows(&got), rows(&expected));
    let error = m.into_weight(Some(5), to(true)).unwrap_err().to_string();
    assert!(error.contains("5 heads"), "{error}");
}

#[test]
fn what_no_format_holds_is_refused() {
    let size = (16, 96);
    let plain = More {
        zeros: false,
        shuffled: false,
        lowest: 0,
    };
    let refused = |m: Unpacked, said: &str| {
        let error = m.into_weight(None, to(true)).unwrap_err().to_string();
        assert!(
            error.lines().next().is_some_and(|line| line.contains(said)),
            "{error}"
        );
    };
    refused(matrix(4, 4, size, 6, plain), "groups of 16");
    refused(matrix(4, 8, size, 6, plain), "groups of 16");
    refused(
        matrix(
            4,
            8,
            size,
            1,
            More {
                zeros: true,
                ..plain
            },
        ),
        "zero points",
    );
    let mut exact = matrix(4, 4, size, 1, plain);
    exact.scales[3] = 0.1;
    refused(exact.clone(), "0.1, expected an f16");
    exact.scales[3] = f32::NAN;
    refused(exact.clone(), "NaN");
    exact.scales[3] = 0.5;
    exact.groups = Some(vec![1; 96]);
    refused(exact.clone(), "group index");
    exact.groups = Some(vec![0; 95]);
    refused(exact, "group index");
}
