//! Products with quantized weights on a GPU, against the library's with weights of bf16: INT8, INT4 in
//! groups of 128 and ternary, on the shapes of Llama-3-8B and SmolLM2-135M, from cold memory.

use candle_core::cuda_backend::cudarc::driver::sys::CUevent_flags;
use candle_core::{CudaDevice, DType, Device, Error, Result, Tensor, bail};
use candle_fused::cuda::BlockMatrix;
use candle_fused::ops::{Epilogue, Prologue, Weight, linear, quant_linear};
use candle_fused::quant::{Codes, Scheme, TernaryScale};
use std::sync::Arc;

/// Outputs and inputs.
const SHAPES: [(usize, usize); 8] = [
    (4096, 4096),
    (14336, 4096),
    (4096, 14336),
    (128256, 4096),
    (576, 576),
    (1536, 576),
    (576, 1536),
    (49152, 576),
];

const SCHEMES: [(&str, Scheme); 5] = [
    ("int8", Scheme::Int8),
    (
        "int4 g128",
        Scheme::Int4 {
            group: 128,
            zero_point: false,
        },
    ),
    (
        "int4 g32 z",
        Scheme::Int4 {
            group: 32,
            zero_point: true,
        },
    ),
    (
        "ternary",
        Scheme::Ternary {
            scale: TernaryScale::Row,
        },
    ),
    (
        "ternary g128",
        Scheme::Ternary {
            scale: TernaryScale::Group(128),
        },
    ),
];

/// Bytes of weights that take turns: more than any L2 holds.
const COLD: usize = 192 << 20;

/// Matrices that take turns at most.
const COPIES: usize = 64;

/// Passes over 256 MB that take the GPU longer than the host takes for its calls.
const BUSY: usize = 10;

const ROUNDS: usize = 5;
const CALLS: usize = 24;

/// Calls of one contender with weights in turn.
type Call = Box<dyn Fn(usize) -> Result<Tensor>>;

/// Reports the shapes that are wanted: `gpu quantized 4096x4096`.
pub fn report(device: &Device, bandwidth: f64, wanted: impl Fn(&str) -> bool) -> Result<()> {
    let Device::Cuda(cuda) = device else {
        bail!("expected a CUDA device");
    };
    // SAFETY: one stream is all that this thread uses.
    unsafe { cuda.disable_event_tracking() };
    let busy = Tensor::zeros(128 << 20, DType::BF16, device)?;
    for (n, k) in SHAPES {
        if !wanted(&format!("gpu quantized {n}x{k}")) {
            continue;
        }
        let rows: &[usize] = match (n, k) {
            (14336, 4096) | (4096, 14336) => &[1, 2, 4, 8, 16, 32, 64, 128, 512, 2048],
            (4096, 4096) | (128256, 4096) => &[1, 16, 512],
            _ => &[1, 16],
        };
        let shape = Shape::new(n, k, device)?;
        for m in rows {
            shape.compare(cuda, &busy, bandwidth, *m)?;
        }
    }
    Ok(())
}

/// The same shape in all formats.
struct Shape {
    n: usize,
    k: usize,
    dense: Vec<Tensor>,
    quantized: Vec<(&'static str, Vec<Weight>, usize)>,
}

impl Shape {
    fn new(n: usize, k: usize, device: &Device) -> Result<Self> {
        let copies = |bytes: usize| COLD.div_ceil(bytes).clamp(1, COPIES);
        let dense = (0..copies(2 * n * k))
            .map(|_| Tensor::randn(0f32, 0.05, (n, k), device)?.to_dtype(DType::BF16))
            .collect::<Result<_>>()?;
        let mut quantized = Vec::new();
        for (name, scheme) in SCHEMES {
            if matches!(scheme, Scheme::Int4 { group, .. } if !k.is_multiple_of(group))
                || (name.ends_with("g128") && !k.is_multiple_of(128))
            {
                continue;
            }
            let codes = random(scheme, n, k);
            let first = BlockMatrix::from_codes(&codes, device)?;
            let bytes = first.size_in_bytes();
            let mut weights = vec![Weight::Blocks(Arc::new(first))];
            while weights.len() < copies(bytes) {
                let matrix = BlockMatrix::from_codes(&codes, device)?;
                weights.push(Weight::Blocks(Arc::new(matrix)));
            }
            quantized.push((name, weights, bytes));
        }
        Ok(Self {
            n,
            k,
            dense,
            quantized,
        })
    }

    fn compare(&self, cuda: &CudaDevice, busy: &Tensor, bandwidth: f64, m: usize) -> Result<()> {
        let (n, k) = (self.n, self.k);
        let x = Tensor::randn(0f32, 1., (m, k), self.dense[0].device())?.to_dtype(DType::BF16)?;
        let mut contenders: Vec<(&str, usize, Call)> = Vec::new();
        let dense = self.dense.clone();
        let input = x.clone();
        contenders.push((
            "library bf16",
            2 * n * k,
            Box::new(move |i| input.matmul(&dense[i % dense.len()].t()?)),
        ));
        let dense = self.dense.clone();
        let input = x.clone();
        contenders.push((
            "ours bf16",
            2 * n * k,
            Box::new(move |i| linear(&input, &dense[i % dense.len()], &Epilogue::default())),
        ));
        for (name, weights, bytes) in &self.quantized {
            check(name, &x, &weights[0])?;
            let (weights, input) = (weights.clone(), x.clone());
            contenders.push((
                name,
                *bytes,
                Box::new(move |i| {
                    let weight = std::slice::from_ref(&weights[i % weights.len()]);
                    quant_linear(&input, Prologue::None, weight, &Epilogue::default())
                }),
            ));
        }
        let mut times = vec![Vec::new(); contenders.len()];
        for _ in 0..ROUNDS {
            for ((_, _, call), times) in contenders.iter().zip(&mut times) {
                times.push(seconds(cuda, busy, call)?);
            }
        }
        let median = |times: &mut Vec<f64>| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        };
        let times: Vec<f64> = times.iter_mut().map(median).collect();
        for ((name, bytes, _), time) in contenders.iter().zip(&times) {
            let rate = *bytes as f64 / time;
            println!(
                "gpu quantized {:<14}{:<5}{name:<14}{:>9.2} us{:>9.0} GB/s{:>6.0}%{:>8.2}x",
                format!("{n}x{k}"),
                format!("m{m}"),
                time * 1e6,
                rate / 1e9,
                100. * rate / bandwidth,
                times[0] / time
            );
        }
        Ok(())
    }
}

/// Seconds of a call among many in a row, with the GPU kept busy until all of them are queued.
fn seconds(cuda: &CudaDevice, busy: &Tensor, call: &Call) -> Result<f64> {
    let stream = cuda.cuda_stream();
    for _ in 0..BUSY {
        busy.affine(1., 0.)?;
    }
    let mark = || {
        let flags = Some(CUevent_flags::CU_EVENT_DEFAULT);
        stream.record_event(flags).map_err(Error::wrap)
    };
    let begin = mark()?;
    for i in 0..CALLS {
        call(i)?;
    }
    let end = mark()?;
    let milliseconds = begin.elapsed_ms(&end).map_err(Error::wrap)?;
    Ok(f64::from(milliseconds) * 1e-3 / CALLS as f64)
}

/// Random codes: some that repeat, since what they are does not matter to the time.
fn random(scheme: Scheme, rows: usize, cols: usize) -> Codes {
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};
    let mut rng = StdRng::seed_from_u64(7);
    let (range, group, has_zeros) = match scheme {
        Scheme::Int8 => (-127..=127, cols, false),
        Scheme::Int4 { group, zero_point } => (0..=15, group, zero_point),
        Scheme::Ternary {
            scale: TernaryScale::Group(group),
        } => (-1..=1, group, false),
        Scheme::Ternary { .. } => (-1..=1, cols, false),
    };
    let some: Vec<i8> = (0..1_000_003)
        .map(|_| rng.random_range(range.clone()))
        .collect();
    let groups = rows * (cols / group);
    Codes {
        scheme,
        rows,
        cols,
        codes: some.iter().copied().cycle().take(rows * cols).collect(),
        scales: vec![1. / 1024.; groups],
        zeros: match has_zeros {
            true => (0..groups).map(|_| rng.random_range(80..=160)).collect(),
            false => Vec::new(),
        },
    }
}

/// Fails if the product is not that of the dequantized weights.
fn check(name: &str, x: &Tensor, weight: &Weight) -> Result<()> {
    let Weight::Blocks(matrix) = weight else {
        bail!("expected weights on a GPU");
    };
    let weights = std::slice::from_ref(weight);
    let ours = quant_linear(x, Prologue::None, weights, &Epilogue::default())?;
    let ours = ours.to_dtype(DType::F32)?;
    let values = matrix.dequantize(DType::F32)?;
    let expected = x.to_dtype(DType::F32)?.matmul(&values.t()?)?;
    let most = expected.abs()?.max_all()?.to_scalar::<f32>()?;
    let error = (ours - expected)?.abs()?.max_all()?.to_scalar::<f32>()?;
    // Ternary weights meet activations of 8 bits, and many rows of them do in INT8.
    let eight_bits = name.starts_with("ternary") || name == "int8";
    let limit = if eight_bits { 0.03 } else { 0.01 };
    if error.is_nan() || error > limit * most {
        bail!(
            "{name} {weight:?} with {} rows: {error} of {most}",
            x.dims()[0]
        );
    }
    Ok(())
}
