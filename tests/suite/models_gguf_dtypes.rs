//! GGUF files with activations in 16 bits.

use crate::gguf_file::{bytes, mixed_bytes};
use crate::golden::{Golden, relative_error};
use crate::subject::{ALL, gguf, gguf_with_dtype};
use crate::support::{device, on_every_device};
use candle_core::quantized::gguf_file::Content;
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{D, DType, Device, IndexOp, Result, Tensor};
use candle_fused::generation::Options;
use candle_fused::models::qwen3::ModelWeights;
use candle_fused::ops::ActivationBits;
use candle_fused::{Fusion, trace};
use std::collections::HashMap;
use std::io::Cursor;

const DTYPES: [(DType, f64); 2] = [(DType::BF16, 2e-3), (DType::F16, 2.5e-4)];

/// The golden's file with the values that its matrices have in blocks of a type, as f32.
fn rounded(golden: &Golden, dtype: GgmlDType) -> Result<Vec<u8>> {
    let path = golden.folder.join("model.safetensors");
    let weights = candle_core::safetensors::load(path, &Device::Cpu)?;
    let of_blocks = |t: &Tensor| -> Result<Tensor> {
        match t.rank() == 2 && t.dim(D::Minus1)?.is_multiple_of(dtype.block_size()) {
            true => QTensor::quantize(t, dtype)?.dequantize(&Device::Cpu),
            false => Ok(t.clone()),
        }
    };
    let weights: Result<HashMap<_, _>> = weights
        .iter()
        .map(|(name, t)| Ok((name.clone(), of_blocks(t)?)))
        .collect();
    mixed_bytes(&golden.config(), &weights?, |_| GgmlDType::F32)
}

/// Each state and the logits are held to twice what candle's own operations lose in that dtype, plus half a unit of its
/// last place, against f32 over the values of the blocks.
#[test]
fn activations_in_16_bits_stay_within_twice_the_plain_error() -> Result<()> {
    on_every_device(|| {
        // The CPU rounds activations of long prompts to 8 bits if it is not told otherwise.
        let exactly = Fusion {
            activations: ActivationBits::Bits16,
            ..Fusion::all()
        };
        for name in ALL {
            let golden = Golden::open(name)?;
            let ids = golden.input_ids()?;
            for blocks in [GgmlDType::Q8_0, GgmlDType::Q4_0, GgmlDType::F32] {
                let (file, values) = (bytes(&golden, blocks)?, rounded(&golden, blocks)?);
                let states = |file: &[u8], dtype, fusion| -> Result<Vec<Tensor>> {
                    let mut model = gguf_with_dtype(&golden, file, dtype, fusion)?;
                    let (mut states, logits) = model.hidden_states(&ids, 0)?;
                    states.push(logits);
                    Ok(states)
                };
                let exact = states(&values, DType::F32, Fusion::none())?;
                for (dtype, floor) in DTYPES {
                    let plain = states(&values, dtype, Fusion::none())?;
                    let fused = states(&file, dtype, exactly)?;
                    for (i, exact) in exact.iter().enumerate() {
                        let error = |t: &Tensor| relative_error(t, exact);
                        let (fused, plain) = (error(&fused[i])?, error(&plain[i])?);
                        assert!(
                            fused <= 2. * plain + floor,
                            "{name} {blocks:?} {dtype:?} state {i}: {fused:e}, plain {plain:e}"
                        );
                    }
                }
            }
        }
        Ok(())
    })
}

/// Blocks stay blocks: each product takes them as they are.
#[test]
fn blocks_are_multiplied_as_they_are() -> Result<()> {
    on_every_device(|| {
        let golden = Golden::open("llama_gqa_tied")?;
        let file = bytes(&golden, GgmlDType::Q8_0)?;
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let mut model = gguf_with_dtype(&golden, &file, dtype, Fusion::all())?;
            let (logits, calls) = trace::capture(|| model.forward(&golden.input_ids()?, 0));
            assert_eq!(logits?.dtype(), DType::F32);
            let layers = golden.outputs["hidden_states"].dim(0)? as u64 - 1;
            // Rows of the MLP's last matrix are no whole blocks, so that it is dense.
            assert_eq!(calls.count("quant_linear"), 3 * layers + 1, "{dtype:?}");
        }
        Ok(())
    })
}

/// `Generation` and its CUDA graph take them, too, and what they choose is likely in f32.
#[test]
fn they_generate() -> Result<()> {
    on_every_device(|| {
        for name in ALL {
            let golden = Golden::open(name)?;
            let file = bytes(&golden, GgmlDType::Q8_0)?;
            let ids: Vec<Vec<u32>> = golden.input_ids()?.to_vec2()?;
            for (dtype, _) in DTYPES {
                let model = gguf_with_dtype(&golden, &file, dtype, Fusion::all())?;
                let mut generation = model.generation(&Options {
                    positions: Some(128),
                    ..Default::default()
                })?;
                let mut token = generation.extend(0, &ids[0])?;
                let mut read = ids[0].clone();
                for _ in 0..4 {
                    let seen = Tensor::new(&read[..], &device())?.unsqueeze(0)?;
                    let logits = gguf(&golden, &file, Fusion::all())?
                        .forward(&seen, 0)?
                        .i(0)?;
                    let logits = logits.to_vec1::<f32>()?;
                    let most = logits.iter().copied().fold(f32::MIN, f32::max);
                    let least = logits.iter().copied().fold(f32::MAX, f32::min);
                    let behind = most - logits[token as usize];
                    assert!(
                        behind <= 0.05 * (most - least),
                        "{name} {dtype:?}: {behind}"
                    );
                    read.push(token);
                    token = generation.step()?[0].expect("a token");
                }
                assert_eq!(generation.graph_refusal(), None, "{name} {dtype:?}");
            }
        }
        Ok(())
    })
}

#[test]
fn other_dtypes_are_refused() -> Result<()> {
    let file = bytes(&Golden::open("qwen3_qknorm")?, GgmlDType::Q8_0)?;
    for dtype in [DType::F64, DType::U32] {
        let mut reader = Cursor::new(&file);
        let content = Content::read(&mut reader)?;
        let (cpu, fusion) = (Device::Cpu, Fusion::all());
        let loaded = ModelWeights::from_gguf_with_dtype(content, &mut reader, &cpu, dtype, fusion);
        let error = loaded.expect_err("an error").to_string();
        let said = format!("gguf: dtype is {dtype:?}, expected f32, f16 or bf16");
        assert!(error.contains(&said), "{error}");
    }
    Ok(())
}
