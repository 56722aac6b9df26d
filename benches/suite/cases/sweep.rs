//! One product over the number of rows of x, format by format. Kernels are chosen by the number of
//! rows, and where the choice is wrong its time jumps.

use super::products::{self, Product};
use super::{Case, Contender, Extent, quantized};
use crate::place::Place;
use candle_core::DType;

/// Weight formats beside the dense ones, each with what candle has of about its size.
const FORMATS: [(&str, &str); 10] = [
    ("q8_0", "q8_0"),
    ("q4_0", "q4_0"),
    ("q4k", "q4k"),
    ("int8", "q8_0"),
    ("fp8", "q8_0"),
    ("fp8-block128", "q8_0"),
    ("nvfp4", "q4_0"),
    ("nf4", "q4_0"),
    ("int4-g128", "q4_0"),
    ("ternary-row", "q4_0"),
];

/// Powers of two and what lies between them.
const ROWS: [usize; 22] = [
    1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
];

/// The product of a large model, and one for a first look.
fn shape(extent: Extent) -> (usize, usize) {
    match extent {
        Extent::Full => (4096, 14336),
        Extent::Quick => (1024, 1024),
    }
}

fn rows(extent: Extent) -> &'static [usize] {
    match extent {
        Extent::Full => &ROWS,
        Extent::Quick => &[1, 4, 16, 64],
    }
}

/// All formats for all numbers of rows. On a GPU x is in bf16, each format meets the library's product
/// in bf16, and both are timed in CUDA graphs too; on the CPU it meets candle's own product.
pub fn cases(place: &Place, extent: Extent) -> Vec<Case> {
    let (n, k) = shape(extent);
    let model = format!("{n}x{k}");
    let x = if place.device.is_cuda() {
        DType::BF16
    } else {
        DType::F32
    };
    let mut cases = Vec::new();
    for dtype in &place.dtypes {
        let dense = |m: &usize| products::case(&model, Product::plain(n, k), *m, *dtype);
        cases.extend(rows(extent).iter().map(dense));
    }
    for formats in FORMATS {
        let of = |m: &usize| quantized::case(&model, &Product::plain(n, k), (*m, x), formats);
        cases.extend(rows(extent).iter().map(of));
    }
    cases.into_iter().map(in_graph).collect()
}

/// The same case, timed in a graph for any number of rows.
fn in_graph(case: Case) -> Case {
    let build = case.build;
    Case {
        build: Box::new(move |place| {
            Ok(build(place)?.into_iter().map(Contender::recorded).collect())
        }),
        ..case
    }
}
