//! Quantized models in the layouts of compressed-tensors (`pack-quantized`, and `float-quantized` for FP8), which vLLM and transformers
//! load; `models::checkpoint` reads it back.

use super::save::Saved;
use crate::models::names::Names;
use crate::nn::pack::named;
use crate::quant::{Codes, FP8_BLOCK, Format, Scheme};
use candle_core::{Result, bail};
use half::f16;
use safetensors::Dtype;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The tensors of a model in that layout, and its `quantization_config`.
///
/// # Errors
/// If a matrix is in a scheme that the layout does not have, or the embedding is quantized, or a head that
/// is tied to it.
pub fn layout(
    saved: Vec<(String, Saved)>,
    names: &Names,
    tied: bool,
) -> Result<(Vec<(String, Saved)>, Value)> {
    let mut tensors = Vec::new();
    let mut groups: BTreeMap<String, (Scheme, Vec<String>)> = BTreeMap::new();
    let mut ignored = Vec::new();
    for (name, tensor) in saved {
        let stem = name.strip_suffix(".weight").unwrap_or(&name);
        match tensor {
            Saved::Packed(..) if stem == names.embedding || (tied && stem == names.head) => {
                bail!(
                    "tensor `{name}` is quantized, expected an embedding of numbers, and its tied head"
                )
            }
            Saved::Packed(matrix, heads) => {
                let Format::Scheme(scheme) = matrix.format() else {
                    bail!(
                        "tensor `{name}` is {}, expected int8, fp8 or int4",
                        matrix.format()
                    );
                };
                let mut codes = matrix.to_codes()?;
                if let Some(heads) = heads {
                    if scheme == Scheme::Fp8Block128 {
                        bail!(
                            "tensor `{name}`: rows of {heads} heads stand apart in {scheme}, expected fp8"
                        );
                    }
                    put_together(&mut codes, heads);
                }
                for (part, saved) in named(&name, parts(codes))? {
                    tensors.push((format!("{stem}.{part}"), saved));
                }
                let (_, stems) = groups
                    .entry(scheme.to_string())
                    .or_insert_with(|| (scheme, Vec::new()));
                stems.push(stem.to_owned());
            }
            dense => {
                let is_matrix = matches!(&dense, Saved::Dense(t) if t.rank() == 2);
                if is_matrix && stem != names.embedding {
                    ignored.push(stem.to_owned());
                }
                tensors.push((name, dense));
            }
        }
    }
    if tied {
        ignored.push(names.head.to_owned());
    }
    Ok((tensors, config(&groups, &ignored)))
}

/// `quantization_config`.
fn config(groups: &BTreeMap<String, (Scheme, Vec<String>)>, ignored: &[String]) -> Value {
    let only = groups.len() == 1;
    let format_of = |scheme: &Scheme| match scheme.is_fp8() {
        true => "float-quantized",
        false => "pack-quantized",
    };
    let mut formats = groups.values().map(|(scheme, _)| format_of(scheme));
    let first = formats.next().unwrap_or("pack-quantized");
    let format = match formats.all(|other| other == first) {
        true => first,
        false => "mixed-precision",
    };
    let group = |(scheme, stems): &(Scheme, Vec<String>)| {
        let mut weights = json!({
            "num_bits": scheme.bits(), "type": "int", "symmetric": true, "dynamic": false,
            "strategy": "channel",
        });
        if scheme.is_fp8() {
            weights["type"] = "float".into();
        }
        if *scheme == Scheme::Fp8Block128 {
            weights["strategy"] = "block".into();
            weights["block_structure"] = json!([FP8_BLOCK, FP8_BLOCK]);
        } else if let Some(group) = scheme.group() {
            weights["strategy"] = "group".into();
            weights["group_size"] = group.into();
        }
        let targets = match only {
            true => json!(["Linear"]),
            false => json!(stems),
        };
        json!({ "targets": targets, "weights": weights, "format": format_of(scheme) })
    };
    let groups = groups.values().map(group).enumerate();
    let groups: serde_json::Map<_, _> = groups
        .map(|(index, group)| (format!("group_{index}"), group))
        .collect();
    json!({
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignored,
    })
}

/// The tensors of a matrix.
fn parts(codes: Codes) -> Result<Vec<(&'static str, Saved)>> {
    let Codes {
        scheme, rows, cols, ..
    } = codes;
    if scheme.is_fp8() {
        return Ok(floats(codes));
    }
    // Codes of 4 bits are stored with 8 added, as ours are; those of 8 bits with 128.
    let (bits, offset) = match scheme {
        Scheme::Int8 => (8, 0x80),
        Scheme::Int4 {
            zero_point: false, ..
        } => (4, 0),
        other => bail!("{other}, expected int8, fp8 or int4 without zero points"),
    };
    let in_word = 32 / bits;
    let word = |codes: &[i8]| {
        let fields = codes.iter().enumerate();
        fields.fold(0u32, |word, (i, q)| {
            word | u32::from(*q as u8 ^ offset) << (i * bits)
        })
    };
    let words = codes.codes.chunks_exact(cols.max(1));
    let words = words.flat_map(|row| row.chunks(in_word).map(word));
    let packed = words.flat_map(u32::to_le_bytes).collect();
    let (dtype, scales): (_, Vec<u8>) = match scheme.group() {
        Some(_) => {
            let halves = codes.scales.iter().map(|s| f16::from_f32(*s));
            (Dtype::F16, halves.flat_map(f16::to_le_bytes).collect())
        }
        None => {
            let scales = codes.scales.iter();
            (Dtype::F32, scales.flat_map(|s| s.to_le_bytes()).collect())
        }
    };
    let groups = codes.scales.len() / rows.max(1);
    let shape = [rows as i64, cols as i64];
    let shape = shape.into_iter().flat_map(i64::to_le_bytes).collect();
    let width = cols.div_ceil(in_word);
    Ok(vec![
        (
            "weight_packed",
            Saved::Raw(Dtype::I32, vec![rows, width], packed),
        ),
        (
            "weight_scale",
            Saved::Raw(dtype, vec![rows, groups], scales),
        ),
        ("weight_shape", Saved::Raw(Dtype::I64, vec![2], shape)),
    ])
}

/// The tensors of a matrix of e4m3 floats.
fn floats(codes: Codes) -> Vec<(&'static str, Saved)> {
    let (rows, cols) = (codes.rows, codes.cols);
    let across = codes.scheme.group().map_or(1, |group| cols.div_ceil(group));
    let down = codes.scales.len() / across.max(1);
    let scales = codes.scales.iter().flat_map(|s| s.to_le_bytes()).collect();
    let bytes = codes.codes.iter().map(|q| *q as u8).collect();
    vec![
        (
            "weight",
            Saved::Raw(Dtype::F8_E4M3, vec![rows, cols], bytes),
        ),
        (
            "weight_scale",
            Saved::Raw(Dtype::F32, vec![down, across], scales),
        ),
    ]
}

/// Rows `[3, heads, ..]` as the checkpoint has them, `[heads, 3, ..]`.
fn put_together(codes: &mut Codes, heads: usize) {
    let (rows, cols) = (codes.rows, codes.cols);
    let size = rows / 3 / heads;
    let source = |row: usize| {
        let (head, part, within) = (row / (3 * size), row / size % 3, row % size);
        (part * heads + head) * size + within
    };
    let groups = codes.scales.len() / rows;
    let gathered = |row: usize| source(row) * cols..(source(row) + 1) * cols;
    codes.codes = (0..rows)
        .flat_map(|row| codes.codes[gathered(row)].to_vec())
        .collect();
    let gathered = |row: usize| source(row) * groups..(source(row) + 1) * groups;
    codes.scales = (0..rows)
        .flat_map(|row| codes.scales[gathered(row)].to_vec())
        .collect();
}
