//! Products that the kernels of the table of `linear` on CUDA are timed on.

use super::products::{Part, Product};
use super::{Dims, Extent, quantized};
use candle_core::{DType, Result};
use common::shapes::Shape;
#[cfg(feature = "cuda")]
use {super::Contender, super::products::Tensors, crate::figures::Work, crate::place::Place};

/// Weight formats of the grid.
const FORMATS: [&str; 13] = [
    "bf16",
    "q8_0",
    "q4_0",
    "q2k",
    "q4k",
    "q6k",
    "int8",
    "fp8",
    "fp8-block128",
    "nvfp4",
    "nf4",
    "int4-g128",
    "ternary-row",
];

/// M of the grid: on both sides of where the table's rules begin and end.
const ROWS: [usize; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 512];

/// M of a first look, and the most that reach a head.
const QUICK: [usize; 3] = [1, 16, 128];
const MOST_OF_HEAD: usize = 16;

/// Of Llama-3-8B, N and K: many output channels, and a long sum.
const LARGE: [(usize, usize); 2] = [(14336, 4096), (4096, 14336)];

/// M, N and K of those two: every number of rows to 128 and some beyond, or on both sides of where kernels change.
pub fn rows_of_large(extent: Extent) -> Vec<(usize, usize, usize)> {
    let beyond = [192, 256, 384, 512, 1024, 2048, 4096];
    let rows: Vec<usize> = match extent {
        Extent::Full => (1..=128).chain(beyond).collect(),
        Extent::Quick => vec![
            1, 2, 3, 4, 5, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64, 65, 80, 96, 97, 112, 128, 129,
            256, 512, 2048,
        ],
    };
    let of = |(n, k)| rows.iter().map(move |m| (*m, n, k)).collect::<Vec<_>>();
    LARGE.into_iter().flat_map(of).collect()
}

/// A product of `m` rows of x by weights in a format, with what a model has around it.
pub struct KernelCase {
    pub model: String,
    pub product: Product,
    pub m: usize,
    pub x: DType,
    /// A dtype, or a format of quantized weights.
    pub format: String,
}

impl KernelCase {
    /// As `llama-3-8b gate_up m16 int4-g128 x:bf16`.
    pub fn name(&self) -> String {
        let (part, x) = (self.product.name(), self.x.as_str());
        format!("{} {part} m{} {} x:{x}", self.model, self.m, self.format)
    }
}

#[cfg(feature = "cuda")]
impl KernelCase {
    fn dense(&self) -> Option<DType> {
        self.format.parse().ok()
    }

    pub fn work(&self) -> Work {
        let bytes = match self.dense() {
            Some(dtype) => self.product.n() * self.product.k * dtype.size_in_bytes(),
            None => quantized::weight_bytes(&self.product, &self.format),
        };
        self.product.work(self.m, bytes, self.x)
    }

    /// The op's own side, as a model calls it.
    pub fn contender(&self, place: &Place) -> Result<Contender> {
        let rows = (self.m, self.x);
        match self.dense() {
            Some(weights) => Tensors::with_weights(place, &self.product, rows, weights)?.fused(),
            None => {
                let tensors = Tensors::new(place, &self.product, self.m, self.x)?;
                quantized::fused(&tensors, place, &self.format)
            }
        }
    }
}

/// What a grid is made of; empty lists stand for what is taken by default.
pub struct Grid<'a> {
    /// M, N and K.
    pub shapes: Vec<(usize, usize, usize)>,
    pub formats: &'a [String],
    pub dtypes: &'a [DType],
    /// Where no shapes are given, the products of these.
    pub models: Vec<Shape>,
    pub extent: Extent,
}

impl Grid<'_> {
    /// All cases; of the models' those whose K the format divides.
    pub fn cases(&self) -> Result<Vec<KernelCase>> {
        let products = match self.shapes.is_empty() {
            false => self.plain(),
            true => self.of_models()?,
        };
        let default: Vec<_> = FORMATS.map(str::to_owned).into();
        let formats: &[String] = match self.formats {
            [] => &default,
            formats => formats,
        };
        let dtypes: &[DType] = match self.dtypes {
            [] => &[DType::BF16],
            dtypes => dtypes,
        };
        let mut cases = Vec::new();
        for (model, product, m) in &products {
            for format in formats {
                let is_dense = format.parse::<DType>().is_ok();
                // What is asked for by its sizes fails with the reason.
                let fits = !self.shapes.is_empty() || quantized::fits(format, product.k);
                let of = |x: &DType| KernelCase {
                    model: model.clone(),
                    product: product.clone(),
                    m: *m,
                    x: *x,
                    format: format.clone(),
                };
                if is_dense || fits {
                    cases.extend(dtypes.iter().map(of));
                }
            }
        }
        Ok(cases)
    }

    /// The sizes that are given, with nothing around the product.
    fn plain(&self) -> Vec<(String, Product, usize)> {
        let shapes = self.shapes.iter();
        let of =
            |(m, n, k): &(usize, usize, usize)| (format!("{n}x{k}"), Product::plain(*n, *k), *m);
        shapes.map(of).collect()
    }

    /// Every product of the models for every M.
    fn of_models(&self) -> Result<Vec<(String, Product, usize)>> {
        let models = match self.models.is_empty() {
            true => self.extent.models(),
            false => &self.models,
        };
        let rows = match self.extent {
            Extent::Quick => &QUICK[..],
            Extent::Full => &ROWS,
        };
        let mut products = Vec::new();
        for shape in models {
            let dims = Dims::of(*shape)?;
            for part in [Part::Qkv, Part::Output, Part::Up, Part::Down, Part::Head] {
                let product = Product::of(&dims, part);
                let reach = |m: &&usize| part != Part::Head || **m <= MOST_OF_HEAD;
                for m in rows.iter().filter(reach) {
                    products.push((dims.name.clone(), product.clone(), *m));
                }
            }
        }
        Ok(products)
    }
}
