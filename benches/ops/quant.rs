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

/// Sums `data` on all threads: the floor for a product that has to read as many bytes.
fn read(data: &[u64]) {
    let eight = |a: [u64; 8], b: &[u64; 8]| std::array::from_fn(|i| a[i].wrapping_add(b[i]));
    pool::for_ranges(data.len(), 1 << 12, |range| {
        black_box(data[range].as_chunks::<8>().0.iter().fold([0; 8], eight));
    });
}

pub fn run(filters: &[String]) {
    let wanted = |text: &str| filters.iter().all(|f| text.contains(f.as_str()));
    println!(
        "quant: {} threads, {}",
        pool::threads(),
        simd::level().name()
    );
    println!(
        "cold: weights rotate through {} MB; read: a plain sum of as many cold bytes; hot: one \
         matrix over and over. Times include the quantization of the activations.",
        COLD_BYTES >> 20
    );
    let plain = vec![1u64; COLD_BYTES / 8];
    for (rows, cols) in SHAPES {
        for dtype in DTYPES
            .into_iter()
            .filter(|d| cols.is_multiple_of(d.block_size()))
        {
            for m in [1, 2, 4, 512] {
                let name = format!("quant {dtype:?} {rows}x{cols} m{m}.");
                if wanted(&name) {
                    report(&name, Case::new(dtype, rows, cols, m), &plain);
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

fn report(name: &str, case: Case, plain: &[u64]) {
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
    let words = matrices[0].size_in_bytes() / 8;
    let mut at = 0;
    let mut floor = || {
        at = if at + 2 * words <= plain.len() {
            at + words
        } else {
            0
        };
        read(&plain[at..at + words]);
    };
    let mut candle = || {
        black_box(stock.forward(&x).unwrap());
    };
    let round = Duration::from_millis(20);
    let times = compare(
        7,
        round,
        &mut [&mut cold, &mut floor, &mut hot, &mut candle],
    );
    let [cold, floor, hot, candle] = times[..] else {
        unreachable!("four contenders")
    };
    let bytes = matrices[0].size_in_bytes() as f64;
    let macs = (m * rows * cols) as f64;
    print!(
        "{name:32} hot {:9.1} us {:7.1} GMAC/s",
        hot * 1e6,
        macs / hot / 1e9
    );
    if m < 16 {
        print!(
            " cold {:9.1} us {:5.1} GB/s, {:3.0} % of a read at {:5.1} GB/s",
            cold * 1e6,
            bytes / cold / 1e9,
            100.0 * floor / cold,
            bytes / floor / 1e9
        );
    }
    println!(
        "; candle, hot {:9.1} us: {:6.2} x",
        candle * 1e6,
        candle / hot
    );
}
