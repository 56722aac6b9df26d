//! Packed quantized matrices against candle's `QMatMul`.

use crate::compare;
use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{Device, Module, Tensor};
use candle_fused::cpu::packed::{PackedMatrix, Q8Activations};
use candle_fused::cpu::{pool, simd};
use std::hint::black_box;
use std::time::Duration;

const DTYPES: [GgmlDType; 8] = [
    GgmlDType::Q4_0,
    GgmlDType::Q4_1,
    GgmlDType::Q5_0,
    GgmlDType::Q5_1,
    GgmlDType::Q8_0,
    GgmlDType::Q4K,
    GgmlDType::Q5K,
    GgmlDType::Q6K,
];

/// Rows x cols: the projections and the head of a model with hidden size 576, and squares that the
/// K formats fit.
const SHAPES: [(usize, usize); 6] = [
    (576, 576),
    (1536, 576),
    (576, 1536),
    (49152, 576),
    (2048, 2048),
    (49152, 2048),
];

/// Matrices together exceed this, so that none is found in a cache again.
const COLD_BYTES: usize = 192 << 20;

/// Bytes per second that all threads together read, by a plain sum over `COLD_BYTES`.
fn read_bandwidth() -> f64 {
    let data = vec![1u64; COLD_BYTES / 8];
    let mut sum = || {
        pool::for_ranges(data.len(), 1 << 16, |r| {
            black_box(data[r].iter().fold(0u64, |a, b| a.wrapping_add(*b)));
        });
    };
    COLD_BYTES as f64 / compare(9, Duration::ZERO, &mut [&mut sum])[0]
}

pub fn run(filters: &[String]) {
    let wanted = |text: &str| filters.iter().all(|f| text.contains(f.as_str()));
    let bandwidth = read_bandwidth();
    println!(
        "quant: {} threads, {}, read bandwidth {:.1} GB/s",
        pool::threads(),
        simd::level().name(),
        bandwidth / 1e9
    );
    println!(
        "cold: weights rotate through {} MB; hot: one matrix over and over",
        COLD_BYTES >> 20
    );
    for (rows, cols) in SHAPES {
        for dtype in DTYPES
            .into_iter()
            .filter(|d| cols.is_multiple_of(d.block_size()))
        {
            for m in [1, 2, 4, 512] {
                let name = format!("quant {dtype:?} {rows}x{cols} m{m}.");
                if wanted(&name) {
                    report(&name, Case::new(dtype, rows, cols, m), bandwidth);
                }
            }
        }
    }
}

struct Case {
    matrices: Vec<PackedMatrix>,
    stock: QMatMul,
    x: Tensor,
    m: usize,
}

impl Case {
    fn new(dtype: GgmlDType, rows: usize, cols: usize, m: usize) -> Self {
        let device = Device::Cpu;
        let w = Tensor::randn(0f32, 1.0, (rows, cols), &device).unwrap();
        let w = QTensor::quantize(&w, dtype).unwrap();
        let packed = PackedMatrix::pack(dtype, rows, cols, &w.data().unwrap()).unwrap();
        let copies = if m < 16 {
            COLD_BYTES / packed.size_in_bytes() + 1
        } else {
            1
        };
        Self {
            matrices: vec![packed; copies],
            stock: QMatMul::from_qtensor(w).unwrap(),
            x: Tensor::randn(0f32, 1.0, (m, cols), &device).unwrap(),
            m,
        }
    }
}

fn report(name: &str, case: Case, bandwidth: f64) {
    let Case {
        matrices,
        stock,
        x,
        m,
    } = case;
    let (rows, cols) = (matrices[0].rows(), matrices[0].cols());
    let level = simd::level();
    let values = x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let theirs = stock
        .forward(&x)
        .unwrap()
        .flatten_all()
        .unwrap()
        .to_vec1::<f32>()
        .unwrap();
    let mut q = Q8Activations::default();
    let mut out = vec![0f32; m * rows];
    q.refill(level, &values, m, cols).unwrap();
    matrices[0].forward(level, &q, &mut out).unwrap();
    let scale = (theirs.iter().map(|v| v * v).sum::<f32>() / theirs.len() as f32).sqrt();
    let worst = out
        .iter()
        .zip(&theirs)
        .fold(0f32, |a, (x, y)| a.max((x - y).abs()));
    assert!(
        worst < 0.1 * scale,
        "{name}: differs from candle by {worst}, values are about {scale}"
    );

    let mut out_hot = out.clone();
    let mut q_hot = q.clone();
    let mut next = 0;
    let mut cold = || {
        next = (next + 1) % matrices.len();
        q.refill(level, &values, m, cols).unwrap();
        matrices[next].forward(level, &q, &mut out).unwrap();
    };
    let mut hot = || {
        q_hot.refill(level, &values, m, cols).unwrap();
        matrices[0].forward(level, &q_hot, &mut out_hot).unwrap();
    };
    let mut candle = || {
        black_box(stock.forward(&x).unwrap());
    };
    let round = Duration::from_millis(20);
    let times = compare(7, round, &mut [&mut cold, &mut hot, &mut candle]);
    let bytes = matrices[0].size_in_bytes() as f64;
    let macs = (m * rows * cols) as f64;
    println!(
        "{name:32} cold {:9.1} us {:6.1} GB/s ({:3.0} %) hot {:9.1} us {:6.1} GB/s {:7.1} GMAC/s; \
         candle (hot) {:9.1} us, {:5.2} x",
        times[0] * 1e6,
        bytes / times[0] / 1e9,
        100.0 * bytes / times[0] / bandwidth,
        times[1] * 1e6,
        bytes / times[1] / 1e9,
        macs / times[1] / 1e9,
        times[2] * 1e6,
        times[2] / times[1],
    );
}
