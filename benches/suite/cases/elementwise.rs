//! What stands between the products: residual additions, norms, rotation, drawing a token.

use super::picked::{rows_of, spread};
use super::{Case, Contender, Dims, Expected, Extent, limit};
use crate::figures::{CANDLE, FUSED, Work};
use crate::place::Place;
use candle_core::{D, DType, Result, Tensor};
use candle_fused::ops;
use candle_nn::Module;

/// Rows of a result that are checked.
const CHECKED: usize = 16;

const EPS: f64 = 1e-5;

pub fn cases(dims: &Dims, dtype: DType, extent: Extent) -> Vec<Case> {
    let mut cases = Vec::new();
    for m in extent.rows() {
        let (m, k) = (*m, dims.hidden);
        cases.push(residual_add((m, k), dims.neox, dtype, &dims.name));
        cases.push(match dims.neox {
            true => layer_norm((m, k), dtype, &dims.name),
            false => rms_norm((m, k), dtype, &dims.name),
        });
        cases.push(rope(dims, m, dtype));
    }
    cases
}

/// What has to come near the memory's bandwidth.
pub fn large() -> Vec<Case> {
    let shape = (16384, 4096);
    vec![
        residual_add(shape, false, DType::BF16, "16384x4096"),
        rms_norm(shape, DType::BF16, "16384x4096"),
        layer_norm(shape, DType::BF16, "16384x4096"),
    ]
}

fn case(
    op: &'static str,
    model: &str,
    part: &str,
    (rows, dtype, work): (usize, DType, Work),
    build: impl Fn(&Place) -> Result<Vec<Contender>> + 'static,
) -> Case {
    Case {
        op,
        model: model.to_owned(),
        part: part.to_owned(),
        rows,
        context: 0,
        format: dtype.as_str().to_owned(),
        work,
        build: Box::new(build),
    }
}

/// Both sides with the same right result.
fn both(
    rows: &[usize],
    (width, dtype): (usize, DType),
    values: Vec<f64>,
    plain: impl Fn() -> Result<Tensor> + 'static,
    fused: impl Fn() -> Result<Tensor> + 'static,
) -> Vec<Contender> {
    let expected = || {
        let values = values.clone();
        vec![Expected::of_rows(
            rows.to_vec(),
            width,
            values,
            limit(dtype),
        )]
    };
    vec![
        Contender::new(CANDLE, expected(), move |_| Ok(vec![plain()?])),
        Contender::new(FUSED, expected(), move |_| Ok(vec![fused()?])),
    ]
}

/// One residual, or two where attention and MLP stand side by side.
fn residual_add((m, k): (usize, usize), two: bool, dtype: DType, model: &str) -> Case {
    let others = if two { 2 } else { 1 };
    let work = Work::moving((2 + others) * m * k, dtype);
    let part = if two { "two residuals" } else { "residual" };
    case(
        "residual_add",
        model,
        part,
        (m, dtype, work),
        move |place| {
            let x = place.x(&[m, k], dtype)?;
            let residuals = (0..others)
                .map(|i| x.affine(0.5, i as f64))
                .collect::<Result<Vec<_>>>()?;
            let rows = spread(m, CHECKED);
            let picked = residuals
                .iter()
                .map(|r| rows_of(r, &rows))
                .collect::<Result<Vec<_>>>()?;
            let picked: Vec<_> = picked.iter().collect();
            let values = ops::residual_add::reference(&rows_of(&x, &rows)?, &picked)?;
            let (x2, residuals2) = (x.clone(), residuals.clone());
            let plain = move || residuals2.iter().try_fold(x2.clone(), |sum, r| sum + r);
            let fused = move || ops::residual_add(&x, &residuals.iter().collect::<Vec<_>>());
            Ok(both(&rows, (k, dtype), values, plain, fused))
        },
    )
}

fn rms_norm((m, k): (usize, usize), dtype: DType, model: &str) -> Case {
    let work = Work::moving(2 * m * k + k, dtype);
    case("rms_norm", model, "norm", (m, dtype, work), move |place| {
        let (x, w) = (place.x(&[m, k], dtype)?, place.x(&[k], dtype)?);
        let rows = spread(m, CHECKED);
        let host = w.to_device(&candle_core::Device::Cpu)?;
        let values = ops::rms_norm::reference(&rows_of(&x, &rows)?, &host, EPS)?;
        let (x2, w2) = (x.clone(), w.clone());
        let plain = move || candle_nn::ops::rms_norm(&x2, &w2, EPS as f32);
        let fused = move || ops::rms_norm(&x, &w, EPS);
        Ok(both(&rows, (k, dtype), values, plain, fused))
    })
}

fn layer_norm((m, k): (usize, usize), dtype: DType, model: &str) -> Case {
    let work = Work::moving(2 * m * k + 2 * k, dtype);
    case(
        "layer_norm",
        model,
        "norm",
        (m, dtype, work),
        move |place| {
            let x = place.x(&[m, k], dtype)?;
            let (w, b) = (place.x(&[k], dtype)?, place.x(&[k], dtype)?);
            let rows = spread(m, CHECKED);
            let host = |t: &Tensor| t.to_device(&candle_core::Device::Cpu);
            let (hw, hb) = (host(&w)?, host(&b)?);
            let values = ops::layer_norm::reference(&rows_of(&x, &rows)?, &hw, Some(&hb), EPS)?;
            let layer = candle_nn::LayerNorm::new(w.clone(), b.clone(), EPS);
            let x2 = x.clone();
            let plain = move || layer.forward(&x2);
            let fused = move || ops::layer_norm(&x, &w, Some(&b), EPS);
            Ok(both(&rows, (k, dtype), values, plain, fused))
        },
    )
}

/// The queries of a prompt.
fn rope(dims: &Dims, m: usize, dtype: DType) -> Case {
    let (heads, d, rotated) = (dims.heads, dims.head_dim, dims.rotated);
    let work = Work::moving(2 * heads * m * d + m * rotated, dtype);
    let of = (m, dtype, work);
    case("rope", &dims.name, "queries", of, move |place| {
        let x = place.x(&[1, heads, m, d], dtype)?;
        let angles = place.x(&[m, rotated / 2], DType::F32)?;
        let tables = [
            angles.cos()?.to_dtype(dtype)?,
            angles.sin()?.to_dtype(dtype)?,
        ];
        let [cos, sin] = &tables;
        let style = ops::RopeStyle::HalfSplit;
        let host = |t: &Tensor| t.to_device(&candle_core::Device::Cpu);
        let (x_host, cos_host, sin_host) = (host(&x)?, host(cos)?, host(sin)?);
        let values = ops::rope::reference(
            &x_host,
            &ops::Rotation {
                cos: &cos_host,
                sin: &sin_host,
                position: 0,
                style,
            },
        )?;
        let rows = spread(heads * m, 4 * CHECKED);
        let values = rows
            .iter()
            .flat_map(|r| values[r * d..][..d].iter().copied())
            .collect();
        let (x2, [cos2, sin2]) = (x.clone(), tables.clone());
        let plain = move || {
            if rotated == d {
                return candle_nn::rotary_emb::rope(&x2, &cos2, &sin2);
            }
            let turned = x2.narrow(D::Minus1, 0, rotated)?.contiguous()?;
            let turned = candle_nn::rotary_emb::rope(&turned, &cos2, &sin2)?;
            let rest = x2.narrow(D::Minus1, rotated, d - rotated)?;
            Tensor::cat(&[&turned, &rest], D::Minus1)
        };
        let fused = move || {
            let [cos, sin] = &tables;
            let rotation = ops::Rotation {
                cos,
                sin,
                position: 0,
                style,
            };
            ops::rope(&x, &rotation)
        };
        Ok(both(&rows, (d, dtype), values, plain, fused))
    })
}

/// The likeliest token.
pub fn sample(dims: &Dims) -> Case {
    let vocab = dims.vocab;
    let work = Work::moving(vocab, DType::F32);
    let of = (1, DType::F32, work);
    case("sample", &dims.name, "greedy", of, move |place| {
        let logits = place.x(&[1, vocab], DType::F32)?;
        let values: Vec<f32> = logits.flatten_all()?.to_vec1()?;
        let best = (0..vocab).max_by(|a, b| values[*a].total_cmp(&values[*b]).then(b.cmp(a)));
        let best = vec![best.unwrap_or(0) as f64];
        let held = logits.clone();
        let plain = move || logits.argmax(D::Minus1);
        let params = [ops::SamplingParams::default()];
        let fused = move || ops::sample(&held, &params, &[&[]]);
        let mut both = both(&[0], (1, DType::F32), best, plain, fused);
        both.iter_mut()
            .for_each(|contender| contender.expected[0].limit = 0.);
        Ok(both)
    })
}

/// The log-probability of a token.
pub fn logprobs(dims: &Dims) -> Case {
    let vocab = dims.vocab;
    let of = (1, DType::F32, Work::moving(vocab, DType::F32));
    case("logprobs", &dims.name, "top 5", of, move |place| {
        let logits = place.x(&[1, vocab], DType::F32)?;
        let token = Tensor::zeros(1, DType::U32, logits.device())?;
        let values = vec![ops::logprobs::reference(&logits)?[0][0]];
        let held = logits.clone();
        let plain = move || {
            candle_nn::ops::log_softmax(&logits, D::Minus1)?
                .narrow(1, 0, 1)?
                .flatten_all()
        };
        let fused = move || Ok(ops::logprobs(&held, &token, 5)?.chosen);
        Ok(both(&[0], (1, DType::F32), values, plain, fused))
    })
}
