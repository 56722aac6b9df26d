//! `candle_fused::flash_attn` and `flash_attn_v3`: every public item of candle-flash-attn and
//! candle-flash-attn-v3 with candle's signature, so that one that is missing or different does not compile,
//! and what they compute against float64.
#![allow(clippy::type_complexity, reason = "the types are candle's signatures")]

use crate::support::{device, on_every_device, randn_on, values};
use candle_core::{CustomOp3, DType, Device, Result, Tensor, Var};
use candle_fused::ops::flash_attention_varlen::reference as reference_of_ragged;
use candle_fused::ops::{AttentionParams, RaggedBatch, flash_attention};
use candle_fused::{flash_attn, flash_attn_v3};

type T<'a> = &'a Tensor;
type Size = Option<usize>;

fn op<Op: CustomOp3 + Send + Sync + 'static>(_: fn(Op)) {}

#[test]
fn flash_attn_is_there() {
    use flash_attn::*;
    op(|op: FlashAttn| {
        let _: (f32, Option<Tensor>, Size, Size, Option<f32>) = (
            op.softmax_scale,
            op.alibi_slopes,
            op.window_size_left,
            op.window_size_right,
            op.softcap,
        );
    });
    let _ = FlashAttn {
        softmax_scale: 1.,
        alibi_slopes: None,
        window_size_left: None,
        window_size_right: Some(0),
        softcap: None,
    };
    let _: fn(T, T, T, f32, bool) -> Result<Tensor> = flash_attn;
    let _: fn(T, T, T, f32, Size, Size) -> Result<Tensor> = flash_attn_windowed;
    let _: fn(T, T, T, T, f32, bool) -> Result<Tensor> = flash_attn_alibi;
    let _: fn(T, T, T, T, f32, Size, Size) -> Result<Tensor> = flash_attn_alibi_windowed;
    let _: fn(T, T, T, Option<T>, f32, Size, Size, f32) -> Result<Tensor> =
        flash_attn_alibi_windowed_softcap;
    let _: fn(T, T, T, T, T, usize, usize, f32, bool) -> Result<Tensor> = flash_attn_varlen;
    let _: fn(T, T, T, T, T, usize, usize, f32, Size, Size) -> Result<Tensor> =
        flash_attn_varlen_windowed;
    let _: fn(T, T, T, T, T, T, usize, usize, f32, bool) -> Result<Tensor> =
        flash_attn_varlen_alibi;
    let _: fn(T, T, T, T, T, T, usize, usize, f32, Size, Size) -> Result<Tensor> =
        flash_attn_varlen_alibi_windowed;
    let _: fn(T, T, T, Option<T>, T, T, usize, usize, f32, Size, Size, f32) -> Result<Tensor> =
        flash_attn_varlen_alibi_windowed_softcap;
    type Paged = fn(
        T,
        T,
        T,
        T,
        T,
        T,
        Option<T>,
        usize,
        usize,
        f32,
        Size,
        Size,
        usize,
        Option<f32>,
    ) -> Result<Tensor>;
    let _: Paged = flash_attn_varlen_paged_windowed;
}

#[test]
fn flash_attn_v3_is_there() {
    use flash_attn_v3::*;
    op(|op: FlashAttn| {
        let _: (f32, Option<Tensor>, Size, Size, bool) = (
            op.softmax_scale,
            op.alibi_slopes,
            op.window_size_left,
            op.window_size_right,
            op.use_gqa_packing,
        );
    });
    let _ = FlashAttn {
        softmax_scale: 1.,
        alibi_slopes: None,
        window_size_left: None,
        window_size_right: Some(0),
        use_gqa_packing: true,
    };
    let _: fn(T, T, T, f32, bool, bool) -> Result<Tensor> = flash_attn;
    let _: fn(T, T, T, f32, Size, Size, bool) -> Result<Tensor> = flash_attn_windowed;
    let _: fn(T, T, T, T, f32, bool, bool) -> Result<Tensor> = flash_attn_alibi;
    let _: fn(T, T, T, T, f32, Size, Size, bool) -> Result<Tensor> = flash_attn_alibi_windowed;
    let _: fn(T, T, T, T, T, usize, usize, f32, bool, bool) -> Result<Tensor> = flash_attn_varlen;
    let _: fn(T, T, T, T, T, usize, usize, f32, Size, Size, bool) -> Result<Tensor> =
        flash_attn_varlen_windowed;
    let _: fn(T, T, T, T, T, T, usize, usize, f32, bool, bool) -> Result<Tensor> =
        flash_attn_varlen_alibi;
    let _: fn(T, T, T, T, T, T, usize, usize, f32, Size, Size, bool) -> Result<Tensor> =
        flash_attn_varlen_alibi_windowed;
}

/// q, k and v of two sequences, `[2, 40, 4, 64]` and `[2, 70, 2, 64]`, the slopes, and the cumulative lengths
/// of the same sequences one behind the other.
struct Inputs {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    seqlens_q: Tensor,
    seqlens_k: Tensor,
}

const SCALE: f32 = 0.125;

impl Inputs {
    fn new(dtype: DType) -> Result<Self> {
        let device = &device();
        Ok(Self {
            q: randn_on(&[2, 40, 4, 64], dtype, device)?,
            k: randn_on(&[2, 70, 2, 64], dtype, device)?,
            v: randn_on(&[2, 70, 2, 64], dtype, device)?,
            slopes: Tensor::new(&[0.5f32, 0.25, 0.125, 0.0625], device)?,
            seqlens_q: Tensor::new(&[0u32, 40, 80], device)?,
            seqlens_k: Tensor::new(&[0u32, 70, 140], device)?,
        })
    }

    /// One behind the other.
    fn rows(&self) -> Result<[Tensor; 3]> {
        let rows = |t: &Tensor| t.flatten(0, 1);
        Ok([rows(&self.q)?, rows(&self.k)?, rows(&self.v)?])
    }

    /// In float64, `[80, 4, 64]`: the softcap, whether there are slopes, the window.
    fn expected(&self, softcap: Option<f32>, alibi: bool, window: [Size; 2]) -> Result<Vec<f64>> {
        let host = |t: &Tensor| t.to_device(&Device::Cpu);
        let [q, k, v] = self.rows()?;
        let batch = RaggedBatch {
            cu_seqlens_q: host(&self.seqlens_q)?,
            cu_seqlens_k: host(&self.seqlens_k)?,
            max_seqlen_q: 40,
        };
        let [left, right] = window;
        let params = AttentionParams {
            scale: SCALE,
            window: left.map(|left| left + 1),
            window_right: right,
            softcap,
            alibi_slopes: alibi.then(|| host(&self.slopes)).transpose()?,
            ..Default::default()
        };
        values(&reference_of_ragged(
            &host(&q)?,
            &host(&k)?,
            &host(&v)?,
            &batch,
            &params,
        )?)
    }

    /// Holds a result, in either layout, to float64.
    fn hold(&self, y: Result<Tensor>, expected: &[f64]) -> Result<()> {
        let y = y?;
        let shape = if y.rank() == 4 {
            vec![2, 40, 4, 64]
        } else {
            vec![80, 4, 64]
        };
        assert_eq!((y.dims(), y.dtype()), (&shape[..], self.q.dtype()));
        assert!(y.is_contiguous());
        // Twice the rounding of the output's type; f32 sums of 64 products.
        let tolerance = match y.dtype() {
            DType::F16 => 2f64.powi(-10),
            DType::BF16 => 2f64.powi(-7),
            _ => 1e-5,
        };
        for (y, want) in values(&y)?.into_iter().zip(expected) {
            assert!(
                (y - want).abs() <= tolerance * want.abs().max(1.),
                "{y} {want}"
            );
        }
        Ok(())
    }
}

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
const CAUSAL: [Size; 2] = [None, Some(0)];
const NONE: [Size; 2] = [None, None];

#[test]
fn batches_of_one_length() -> Result<()> {
    use flash_attn::*;
    on_every_device(|| {
        for dtype in DTYPES {
            let x = Inputs::new(dtype)?;
            let (q, k, v, slopes) = (&x.q, &x.k, &x.v, &x.slopes);
            for (causal, window) in [(true, CAUSAL), (false, NONE)] {
                let expected = x.expected(None, false, window)?;
                x.hold(flash_attn(q, k, v, SCALE, causal), &expected)?;
                x.hold(
                    flash_attn_v3::flash_attn(q, k, v, SCALE, causal, true),
                    &expected,
                )?;
                let expected = x.expected(None, true, window)?;
                x.hold(flash_attn_alibi(q, k, v, slopes, SCALE, causal), &expected)?;
                let y = flash_attn_v3::flash_attn_alibi(q, k, v, slopes, SCALE, causal, false);
                x.hold(y, &expected)?;
            }
            for window in [CAUSAL, NONE, [Some(9), None], [Some(0), Some(12)]] {
                let [left, right] = window;
                let expected = x.expected(None, false, window)?;
                x.hold(flash_attn_windowed(q, k, v, SCALE, left, right), &expected)?;
                let y = flash_attn_v3::flash_attn_windowed(q, k, v, SCALE, left, right, true);
                x.hold(y, &expected)?;
                let expected = x.expected(None, true, window)?;
                let y = flash_attn_alibi_windowed(q, k, v, slopes, SCALE, left, right);
                x.hold(y, &expected)?;
                let y = flash_attn_v3::flash_attn_alibi_windowed(
                    q, k, v, slopes, SCALE, left, right, true,
                );
                x.hold(y, &expected)?;
                for (softcap, alibi) in [(2.5, true), (2.5, false), (0., true)] {
                    let cap = Some(softcap).filter(|cap| *cap > 0.);
                    let expected = x.expected(cap, alibi, window)?;
                    let slopes = alibi.then_some(slopes);
                    let y = flash_attn_alibi_windowed_softcap(
                        q, k, v, slopes, SCALE, left, right, softcap,
                    );
                    x.hold(y, &expected)?;
                }
            }
        }
        Ok(())
    })
}

#[test]
fn ragged_batches() -> Result<()> {
    use flash_attn::*;
    on_every_device(|| {
        for dtype in DTYPES {
            let x = Inputs::new(dtype)?;
            let ([q, k, v], slopes, a, b) = (&x.rows()?, &x.slopes, &x.seqlens_q, &x.seqlens_k);
            for (causal, window) in [(true, CAUSAL), (false, NONE)] {
                let expected = x.expected(None, false, window)?;
                x.hold(
                    flash_attn_varlen(q, k, v, a, b, 40, 70, SCALE, causal),
                    &expected,
                )?;
                let y =
                    flash_attn_v3::flash_attn_varlen(q, k, v, a, b, 40, 70, SCALE, causal, true);
                x.hold(y, &expected)?;
                let expected = x.expected(None, true, window)?;
                let y = flash_attn_varlen_alibi(q, k, v, slopes, a, b, 40, 70, SCALE, causal);
                x.hold(y, &expected)?;
                let y = flash_attn_v3::flash_attn_varlen_alibi(
                    q, k, v, slopes, a, b, 40, 70, SCALE, causal, true,
                );
                x.hold(y, &expected)?;
            }
            for window in [CAUSAL, [Some(9), None], [Some(0), Some(12)]] {
                let [left, right] = window;
                let expected = x.expected(None, false, window)?;
                let y = flash_attn_varlen_windowed(q, k, v, a, b, 40, 70, SCALE, left, right);
                x.hold(y, &expected)?;
                let y = flash_attn_v3::flash_attn_varlen_windowed(
                    q, k, v, a, b, 40, 70, SCALE, left, right, true,
                );
                x.hold(y, &expected)?;
                let expected = x.expected(None, true, window)?;
                let y = flash_attn_varlen_alibi_windowed(
                    q, k, v, slopes, a, b, 40, 70, SCALE, left, right,
                );
                x.hold(y, &expected)?;
                let y = flash_attn_v3::flash_attn_varlen_alibi_windowed(
                    q, k, v, slopes, a, b, 40, 70, SCALE, left, right, true,
                );
                x.hold(y, &expected)?;
                let expected = x.expected(Some(2.5), true, window)?;
                let y = flash_attn_varlen_alibi_windowed_softcap(
                    q,
                    k,
                    v,
                    Some(slopes),
                    a,
                    b,
                    40,
                    70,
                    SCALE,
                    left,
                    right,
                    2.5,
                );
                x.hold(y, &expected)?;
            }
        }
        Ok(())
    })
}

/// candle-transformers hands over transposed views, as its models have them.
#[test]
fn transposed_views_are_taken() -> Result<()> {
    on_every_device(|| {
        let q = randn_on(&[1, 9, 30, 64], DType::F16, &device())?;
        let k = randn_on(&[1, 3, 30, 64], DType::F16, &device())?;
        let rows = |t: &Tensor| t.transpose(1, 2);
        let y = flash_attn::flash_attn(&rows(&q)?, &rows(&k)?, &rows(&k)?, SCALE, true)?;
        let params = AttentionParams {
            scale: SCALE,
            causal: true,
            ..Default::default()
        };
        let same = flash_attention(&q, &k, &k, &params)?;
        assert_eq!(values(&y)?, values(&rows(&same)?)?);
        Ok(())
    })
}

/// The same sequences with keys and values in shuffled blocks, whose other blocks and slots are NaN.
#[test]
fn keys_in_pages() -> Result<()> {
    use flash_attn::flash_attn_varlen_paged_windowed as paged;
    on_every_device(|| {
        for (dtype, page) in DTYPES.into_iter().zip([32, 32, 64]) {
            let x = Inputs::new(dtype)?;
            let of_sequence = 70usize.div_ceil(page);
            let blocks = [5u32, 0, 3, 6, 2, 7];
            let table: Vec<_> = blocks[..2 * of_sequence].to_vec();
            let pool = |t: &Tensor| -> Result<Tensor> {
                let nan = Tensor::new(f32::NAN, &device())?.to_dtype(dtype)?;
                let pool = nan.broadcast_as((8, page, 2, 64))?.contiguous()?;
                let mut rows: Vec<_> = (0..8).map(|i| pool.get(i)).collect::<Result<_>>()?;
                for (i, block) in table.iter().enumerate() {
                    let (b, first) = (i / of_sequence, i % of_sequence * page);
                    let n = page.min(70 - first);
                    let some = t.get(b)?.narrow(0, first, n)?;
                    let rest = nan.broadcast_as((page - n, 2, 64))?;
                    rows[*block as usize] = match n == page {
                        true => some.contiguous()?,
                        false => Tensor::cat(&[&some, &rest.contiguous()?], 0)?,
                    };
                }
                Tensor::stack(&rows, 0)
            };
            let (k, v) = (pool(&x.k)?, pool(&x.v)?);
            let table = Tensor::new(table, &device())?.reshape((2, of_sequence))?;
            let [q, ..] = x.rows()?;
            let (of_q, of_k) = (&x.seqlens_q, &x.seqlens_k);
            for (left, softcap) in [
                (None, None),
                (Some(9), None),
                (None, Some(5.)),
                (None, Some(0.)),
            ] {
                let cap = softcap.filter(|cap| *cap != 0.);
                let expected = x.expected(cap, false, [left, Some(0)])?;
                // On a GPU candle has no such conversion.
                let signed = table.to_device(&Device::Cpu)?.to_dtype(DType::I32)?;
                for table in [table.clone(), signed.to_device(&device())?] {
                    let y = paged(
                        &q,
                        &k,
                        &v,
                        of_q,
                        of_k,
                        &table,
                        None,
                        40,
                        70,
                        SCALE,
                        left,
                        Some(0),
                        page,
                        softcap,
                    );
                    x.hold(y, &expected)?;
                }
            }
            let refused = |of_k: &Tensor, ranges: Option<&Tensor>, right: Size, size: usize| {
                let y = paged(
                    &q, &k, &v, of_q, of_k, &table, ranges, 40, 70, SCALE, None, right, size, None,
                );
                y.expect_err("accepted").to_string()
            };
            let said = refused(of_k, Some(&table), Some(0), page);
            assert!(said.contains("mm_prefix_ranges are given"), "{said}");
            let said = refused(of_k, None, None, page);
            assert!(said.contains("window_size_right is None"), "{said}");
            let said = refused(of_k, None, Some(0), 16);
            assert!(said.contains("page_block_size is 16"), "{said}");
            let said = refused(&of_k.narrow(0, 0, 2)?, None, Some(0), page);
            assert!(said.contains("seqlens_k is U32 [2]"), "{said}");
            if device().is_cpu() {
                let said = refused(&Tensor::new(&[0u32, 5, 3], &device())?, None, Some(0), page);
                assert!(said.contains("seqlens_k decreases from 5 to 3"), "{said}");
            }
        }
        Ok(())
    })
}

/// As with candle-flash-attn: weights that are variables are no obstacle, a backward pass is an error.
#[test]
fn variables_are_taken_and_have_no_gradient() -> Result<()> {
    on_every_device(|| {
        let q = Var::from_tensor(&randn_on(&[1, 5, 2, 16], DType::F32, &device())?)?;
        let y = flash_attn::flash_attn(&q, &q, &q, 0.25, true)?;
        let error = y.sum_all()?.backward().expect_err("a backward pass");
        let expected = "backward is not supported for flash-attn";
        assert!(error.to_string().contains(expected), "{error}");
        Ok(())
    })
}

#[test]
fn what_does_not_fit_is_named() -> Result<()> {
    on_every_device(|| {
        let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &device());
        let (q, k) = (zeros(&[1, 6, 4, 8])?, zeros(&[1, 9, 2, 8])?);
        let slopes = zeros(&[2])?;
        for (y, expected) in [
            (
                flash_attn::flash_attn(&zeros(&[6, 4, 8])?, &k, &k, 1., true),
                "flash_attn: q is [6, 4, 8], expected [batch, tokens, heads, dim]",
            ),
            (
                flash_attn::flash_attn(&q, &zeros(&[2, 9, 2, 8])?, &k, 1., true),
                "flash_attn: k is [2, 9, 2, 8], expected [1, keys, kv_heads, 8]",
            ),
            (
                flash_attn_v3::flash_attn(&q, &k, &zeros(&[1, 8, 2, 8])?, 1., true, true),
                "flash_attn: v is [1, 8, 2, 8], expected k's [1, 9, 2, 8]",
            ),
            (
                flash_attn::flash_attn_alibi(&q, &k, &k, &slopes, 1., true),
                "flash_attn: alibi_slopes is [2], expected [4]",
            ),
            (
                flash_attn::flash_attn_varlen(&q, &k, &k, &slopes, &slopes, 6, 9, 1., true),
                "flash_attn_varlen: q is [1, 6, 4, 8], expected [tokens, heads, dim]",
            ),
        ] {
            let error = y.expect_err(expected).to_string();
            assert!(error.contains(expected), "{error}");
        }
        Ok(())
    })
}
