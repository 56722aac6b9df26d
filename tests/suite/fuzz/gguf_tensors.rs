//! The blocks of a GGUF tensor as a packed matrix: copied, and in place.
//!
//! An input is a block type (a byte), how its size is meant (a byte), rows and columns (eight bytes
//! each), and the tensor's bytes.

use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Tensor};
use candle_fused::cpu::packed::{PackedMatrix, SharedBytes};
use candle_fused::ops::{Epilogue, Prologue, Weight, quant_linear};
use candle_fused::quant::{self, BlockFormat};
use std::sync::Arc;

const DTYPES: [GgmlDType; 11] = [
    GgmlDType::Q4_0,
    GgmlDType::Q4_1,
    GgmlDType::Q5_0,
    GgmlDType::Q5_1,
    GgmlDType::Q8_0,
    GgmlDType::Q4K,
    GgmlDType::Q5K,
    GgmlDType::Q6K,
    GgmlDType::Q2K,
    GgmlDType::Q3K,
    GgmlDType::F16,
];

pub fn run(data: &[u8]) {
    let Some((head, bytes)) = data.split_at_checked(18) else {
        return;
    };
    let dtype = DTYPES[usize::from(head[0]) % DTYPES.len()];
    let number = |at: usize| {
        let bytes = head[at..at + 8].try_into().expect("eight bytes");
        u64::from_le_bytes(bytes) as usize
    };
    let (mut rows, mut cols) = (number(2), number(10));
    if head[1] % 2 == 1 {
        // A width that the type takes, and as many rows as there are bytes for.
        cols = (cols % 4 + 1) * dtype.block_size();
        let row = cols / dtype.block_size() * dtype.type_size();
        rows = bytes.len() / row;
    }
    // A builder takes the memory that it is asked for, so it is asked for little or for more than there is.
    let asked = rows.checked_mul(cols);
    if asked.is_none_or(|size| !(1 << 24..1 << 52).contains(&size)) {
        let _ = PackedMatrix::builder(dtype, rows, cols).map(|builder| builder.finish());
    }
    // No rows may be as wide as one likes, and begin behind the end.
    if rows == 0 {
        return;
    }
    let start = usize::from(head[1] >> 1);
    let file: SharedBytes = Arc::new(bytes.to_vec());
    let placed = PackedMatrix::in_place(dtype, rows, cols, file, start);
    let size = BlockFormat::of(dtype).and_then(|f| f.row_bytes(cols));
    let size = size.ok().and_then(|row| row.checked_mul(rows));
    let blocks = bytes.get(start..).unwrap_or_default();
    let blocks = &blocks[..size.unwrap_or(blocks.len()).min(blocks.len())];
    let packed = PackedMatrix::pack(dtype, rows, cols, blocks);
    assert_eq!(placed.is_ok(), packed.is_ok(), "{placed:?}, {packed:?}");
    if let (Ok(placed), Ok(packed)) = (placed, packed) {
        same_numbers(dtype, blocks, &placed, &packed);
        same_products(placed, packed);
    }
}

/// Both give what the blocks hold, to the bit.
fn same_numbers(dtype: GgmlDType, blocks: &[u8], placed: &PackedMatrix, packed: &PackedMatrix) {
    let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    let cols = packed.cols();
    let mut expected = vec![0.; packed.rows() * cols];
    quant::dequantize(dtype, blocks, &mut expected).expect("whole blocks");
    let mut values = vec![0.; cols];
    for (row, expected) in expected.chunks(cols).enumerate() {
        for matrix in [placed, packed] {
            let read = matrix.dequantize_row(row, &mut values);
            read.expect("a row of the matrix");
            assert!(
                same(&values, expected),
                "{dtype:?}: {:x?}, {:x?}",
                bits(&values),
                bits(expected)
            );
        }
    }
}

/// The same values, whatever the bits of what is no number.
fn same(a: &[f32], b: &[f32]) -> bool {
    let equal = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
    a.len() == b.len() && a.iter().zip(b).all(equal)
}

fn same_products(placed: PackedMatrix, packed: PackedMatrix) {
    let (rows, cols) = (packed.rows(), packed.cols());
    let [placed, packed] = [placed, packed].map(|m| Weight::Packed(Arc::new(m)));
    for m in [1, 3] {
        let x: Vec<f32> = (0..m * cols).map(|i| ((i * 37) % 19) as f32 - 9.).collect();
        let x = Tensor::from_vec(x, (m, cols), &Device::Cpu).expect("a matrix");
        let product = |weight: &Weight| {
            let weights = std::slice::from_ref(weight);
            let y =
                quant_linear(&x, Prologue::None, weights, &Epilogue::default()).expect("a product");
            assert_eq!(y.dtype(), DType::F32);
            let y = y.flatten_all().and_then(|y| y.to_vec1::<f32>());
            y.expect("numbers")
        };
        let (a, b) = (product(&placed), product(&packed));
        assert_eq!(a.len(), m * rows);
        assert!(same(&a, &b), "{a:?}, {b:?}");
    }
}
