//! What does not fit is refused by name.

use super::params;
use crate::support::devices;
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::ops::{AttentionParams, RaggedBatch, flash_attention_varlen};

fn refused(what: Result<Tensor>, expected: &str) {
    let message = what.expect_err(expected).to_string();
    assert!(
        message.contains("flash_attention_varlen: ") && message.contains(expected),
        "{message}"
    );
}

fn batch(device: &Device, q: &[u32], k: &[u32]) -> Result<RaggedBatch> {
    Ok(RaggedBatch {
        cu_seqlens_q: Tensor::new(q, device)?,
        cu_seqlens_k: Tensor::new(k, device)?,
        max_seqlen_q: 4,
    })
}

#[test]
fn shapes_and_dtypes_that_do_not_fit_are_named() -> Result<()> {
    for device in devices() {
        let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &device);
        let (q, k) = (zeros(&[6, 4, 8])?, zeros(&[9, 2, 8])?);
        let fits = batch(&device, &[0, 2, 6], &[0, 4, 9])?;
        let plain = AttentionParams::default();
        let call =
            |q: &Tensor, k: &Tensor, v: &Tensor| flash_attention_varlen(q, k, v, &fits, &plain);
        refused(
            call(&zeros(&[1, 6, 4, 8])?, &k, &k),
            "q is [1, 6, 4, 8], expected [tokens, heads, dim]",
        );
        refused(
            call(&q, &zeros(&[9, 2, 7])?, &k),
            "k is [9, 2, 7], expected [keys, kv_heads, 8]",
        );
        refused(call(&q, &k, &zeros(&[8, 2, 8])?), "v is [8, 2, 8]");
        refused(
            call(&q, &zeros(&[9, 3, 8])?, &zeros(&[9, 3, 8])?),
            "q has 4 heads",
        );
        refused(call(&q.to_dtype(DType::U32)?, &k, &k), "q is U32");
        refused(call(&q, &k, &k.to_dtype(DType::F16)?), "v is F16");
        let lengths = |batch: RaggedBatch| flash_attention_varlen(&q, &k, &k, &batch, &plain);
        refused(
            lengths(batch(&device, &[0, 6], &[0, 4, 9])?),
            "cu_seqlens_k is [3], expected cu_seqlens_q's [2]",
        );
        refused(
            lengths(batch(&device, &[0], &[0])?),
            "cu_seqlens_q is [1], expected [sequences + 1]",
        );
        let wide = RaggedBatch {
            cu_seqlens_k: fits.cu_seqlens_k.to_dtype(DType::I64)?,
            ..fits.clone()
        };
        refused(lengths(wide), "cu_seqlens_k is I64, expected u32");
        let mask = AttentionParams {
            mask: Some(zeros(&[1, 1])?),
            ..Default::default()
        };
        refused(
            flash_attention_varlen(&q, &k, &k, &fits, &mask),
            "there is a mask",
        );
        let slopes = AttentionParams {
            alibi_slopes: Some(zeros(&[2])?),
            ..Default::default()
        };
        refused(
            flash_attention_varlen(&q, &k, &k, &fits, &slopes),
            "alibi_slopes is [2], expected [4]",
        );
        if device.is_cuda() {
            let elsewhere = batch(&Device::Cpu, &[0, 2, 6], &[0, 4, 9])?;
            refused(
                lengths(elsewhere),
                "cu_seqlens_q is on another device than q",
            );
        }
    }
    Ok(())
}

#[test]
fn lengths_that_do_not_fit_are_named_on_the_cpu() -> Result<()> {
    let device = Device::Cpu;
    let q = Tensor::zeros((6, 4, 8), DType::F32, &device)?;
    let k = Tensor::zeros((9, 2, 8), DType::F32, &device)?;
    for (q_lengths, k_lengths, expected) in [
        (
            &[0, 4, 3],
            &[0, 4, 9],
            "cu_seqlens_q decreases from 4 to 3 at 2",
        ),
        (
            &[0, 2, 6],
            &[0, 9, 4],
            "cu_seqlens_k decreases from 9 to 4 at 2",
        ),
        (
            &[0, 3, 7],
            &[0, 4, 9],
            "cu_seqlens_q ends at 7, but q has 6 tokens",
        ),
        (
            &[0, 3, 6],
            &[0, 4, 10],
            "cu_seqlens_k ends at 10, but k has 9 tokens",
        ),
        (
            &[0, 5, 6],
            &[0, 4, 9],
            "sequence 0 has 5 queries, max_seqlen_q is 4",
        ),
    ] {
        let batch = batch(&device, q_lengths, k_lengths)?;
        refused(
            flash_attention_varlen(&q, &k, &k, &batch, &params(8, true)),
            expected,
        );
    }
    Ok(())
}
