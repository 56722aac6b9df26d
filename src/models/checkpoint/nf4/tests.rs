//! Which NF4 matrices keep their codes, and that they are the same numbers.

use super::super::tensors::Tensors;
use super::{STATE, read};
use crate::quant::nf4;
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use std::collections::HashMap;

/// Scales of each block of `size` values, with `change` applied to them and to the table.
fn check(
    (rows, cols): (usize, usize),
    size: usize,
    change: impl Fn(&mut [f32], &mut [f32]),
    is_kept: bool,
) {
    let count = rows * cols;
    let bytes: Vec<u8> = (0..count / 2).map(|i| (i * 37 % 251) as u8).collect();
    let mut scales: Vec<f32> = (0..count.div_ceil(size))
        .map(|i| (i as f32 * 0.7).sin() * 0.3)
        .collect();
    let mut table = nf4::TABLE;
    change(&mut scales, &mut table);
    let state = format!(r#"{{"blocksize": {size}, "shape": [{rows}, {cols}]}}"#);
    let cpu = &Device::Cpu;
    let tensors = [
        (
            "weight",
            Tensor::from_vec(bytes.clone(), (count / 2, 1), cpu),
        ),
        ("weight.quant_map", Tensor::new(&table, cpu)),
        ("weight.absmax", Tensor::new(scales.as_slice(), cpu)),
        (STATE, Tensor::new(state.as_bytes(), cpu)),
    ];
    let named = tensors.map(|(part, tensor)| (format!("layer.{part}"), tensor.unwrap()));
    let vb = VarBuilder::from_tensors(HashMap::from(named), DType::F32, cpu);
    let stored = read(&Tensors::new(&vb, "layer"), (rows, cols)).unwrap();
    let expected: Vec<f32> = (0..count)
        .map(|at| {
            let byte = usize::from(bytes[at / 2]);
            let code = if at % 2 == 0 { byte >> 4 } else { byte & 15 };
            table[code] * scales[at / size]
        })
        .collect();
    let codes = stored.kept().map(|kept| kept.into_codes().unwrap());
    assert_eq!(codes.is_some(), is_kept, "{rows}x{cols} by {size}");
    let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    if let Some(codes) = codes {
        codes.check().unwrap();
        assert_eq!(bits(&codes.dequantize()), bits(&expected));
    }
    let values = stored.into_values().unwrap().flatten_all().unwrap();
    assert_eq!(bits(&values.to_vec1().unwrap()), bits(&expected));
}

#[test]
fn codes_are_kept_where_groups_of_64_have_one_scale() {
    let none = |_: &mut [f32], _: &mut [f32]| {};
    check((4, 128), 64, none, true);
    // Blocks of several groups, of several rows, and more than there are values.
    check((4, 256), 128, none, true);
    check((6, 64), 256, none, true);
    check((3, 192), 4096, none, true);
    check((4, 128), 32, none, false);
    check((4, 96), 64, none, false);
    check((4, 32), 64, none, false);
    check((4, 128), 64, |_, table| table[9] += 1e-7, false);
    check((4, 128), 64, |scales, _| scales[3] = f32::INFINITY, false);
}
