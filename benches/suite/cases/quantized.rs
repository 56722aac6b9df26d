//! Products with quantized weights: GGUF's blocks against candle's products of the same blocks, and
//! schemes of our own against the closest that candle has.

use super::picked::rows_of;
use super::products::{Part, Product, Tensors};
use super::{Case, Contender, Dims, Extent};
use crate::figures::{CANDLE, FUSED};
use crate::place::Place;
use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use candle_core::{DType, Device, Result, Tensor, bail};
use candle_fused::Fusion;
use candle_fused::cpu::packed::PackedMatrix;
use candle_fused::nn::{LinearWeight, Projection};
use candle_fused::ops::Weight;
use candle_fused::quant::{Codes, Quantization, Scheme, TernaryScale, quantize};
use std::sync::Arc;

/// Each format with what candle has of about its size.
const FORMATS: [(&str, &str); 15] = [
    ("q4_0", "q4_0"),
    ("q4_1", "q4_1"),
    ("q8_0", "q8_0"),
    ("q2k", "q2k"),
    ("q3k", "q3k"),
    ("q4k", "q4k"),
    ("q6k", "q6k"),
    ("int8", "q8_0"),
    ("fp8", "q8_0"),
    ("fp8-block128", "q8_0"),
    ("nvfp4", "q4_0"),
    ("nf4", "q4_0"),
    ("int4-g128", "q4_0"),
    ("int4-g32-z", "q4_0"),
    ("ternary-row", "q4_0"),
];

/// Of those, the ones of a first look.
const QUICK: [usize; 4] = [0, 7, 8, 14];

/// Both sides round activations to int8, or to bf16 on a GPU, and the reference does not.
const LIMIT: f64 = 4e-2;

/// Rows of weights that are quantized; the others repeat them. A block of FP8 has as many, so that blocks repeat too.
const DISTINCT: usize = 128;

/// Products that are to be so many times faster than the library's in bf16.
pub struct Goal {
    pub format: &'static str,
    pub rows: usize,
    pub must: f64,
    pub shapes: &'static [(usize, usize)],
}

/// Of Llama-3-8B, those of 64 MB in bf16 and more.
const LARGE: [(usize, usize); 3] = [(14336, 4096), (4096, 14336), (128_256, 4096)];

/// All of its shapes, and the ones of SmolLM2 that a format fits.
const ALL: [(usize, usize); 6] = [
    (14336, 4096),
    (4096, 14336),
    (128_256, 4096),
    (4096, 4096),
    (1536, 576),
    (576, 1536),
];
const IN_GROUPS: [(usize, usize); 5] = [ALL[0], ALL[1], ALL[2], ALL[3], ALL[5]];

const fn goal(
    format: &'static str,
    rows: usize,
    must: f64,
    shapes: &'static [(usize, usize)],
) -> Goal {
    Goal {
        format,
        rows,
        must,
        shapes,
    }
}

pub const GOALS: [Goal; 6] = [
    goal("int8", 1, 1.75, &LARGE),
    goal("int4-g128", 1, 3., &LARGE),
    goal("ternary-row", 1, 5., &LARGE),
    goal("int4-g128", 16, 2.5, &IN_GROUPS),
    goal("int8", 512, 1.4, &ALL),
    goal("int8", 2048, 1.4, &ALL),
];

/// The products of those.
pub fn large() -> Vec<Case> {
    let of = |goal: &Goal| {
        let (format, rows) = (goal.format, goal.rows);
        let cases = goal.shapes.iter().map(move |(n, k)| {
            let product = Product::plain(*n, *k);
            case(
                &format!("{n}x{k}"),
                &product,
                (rows, DType::BF16),
                (format, format),
            )
        });
        cases.collect::<Vec<_>>()
    };
    GOALS.iter().flat_map(of).collect()
}

/// On a GPU the largest product of a layer has every number of rows, the others those between which
/// the kernels change.
fn rows(gpu: bool, extent: Extent, part: Part) -> &'static [usize] {
    match (gpu, extent, part) {
        (_, Extent::Quick, _) | (false, ..) => &[1, 128],
        (true, _, Part::Up) => &[1, 8, 16, 128, 512, 2048],
        (true, _, Part::Head) => &[1, 16],
        (true, ..) => &[1, 16, 512],
    }
}

pub fn cases(dims: &Dims, place: &Place, extent: Extent) -> Vec<Case> {
    let gpu = place.device.is_cuda();
    let mut cases = Vec::new();
    for (index, (format, stock)) in FORMATS.into_iter().enumerate() {
        let blocks = format == stock;
        let dtype = if gpu && !blocks {
            DType::BF16
        } else {
            DType::F32
        };
        let wanted = extent == Extent::Full || QUICK.contains(&index);
        for part in [Part::Output, Part::Up, Part::Down, Part::Head] {
            let product = Product::of(dims, part);
            let fits = [format, stock]
                .into_iter()
                .all(|name| fits(name, product.k));
            for m in rows(gpu, extent, part) {
                let few = part != Part::Head || *m <= 16;
                // The most of a layer, and the largest matrix of all.
                let telling = gpu || part != Part::Output;
                if wanted && fits && few && telling {
                    cases.push(case(&dims.name, &product, (*m, dtype), (format, stock)));
                }
            }
        }
    }
    cases
}

pub fn case(
    model: &str,
    product: &Product,
    (m, dtype): (usize, DType),
    (format, stock): (&'static str, &'static str),
) -> Case {
    let bytes = weight_bytes(product, format);
    let product = product.clone();
    Case {
        op: "quant_linear",
        model: model.to_owned(),
        part: product.name().to_owned(),
        rows: m,
        context: 0,
        format: format.to_owned(),
        work: product.work(m, bytes, dtype),
        build: Box::new(move |place| contenders(place, &product, (m, dtype), (format, stock))),
    }
}

/// Bits of a weight in a format, without scales that stand apart.
pub fn weight_bits(format: &str) -> f64 {
    match format.parse::<Quantization>() {
        Ok(Quantization::Gguf(block)) => 8. * block.type_size() as f64 / block.block_size() as f64,
        Ok(other) => other.scheme().map_or(16., |s| f64::from(s.bits())),
        Err(_) => format
            .parse::<DType>()
            .map_or(16., |dtype| 8. * dtype.size_in_bytes() as f64),
    }
}

/// Bytes of a product's weights in a format.
pub fn weight_bytes(product: &Product, format: &str) -> usize {
    ((product.n() * product.k) as f64 * weight_bits(format) / 8.) as usize
}

/// Whether rows of K values can be in a format.
pub fn fits(format: &str, k: usize) -> bool {
    format
        .parse::<Quantization>()
        .is_ok_and(|q| q.check(k).is_ok())
}

/// The fused product alone.
pub fn fused(tensors: &Tensors, place: &Place, format: &str) -> Result<Contender> {
    contender(tensors, place, FUSED, format, Fusion::all())
}

fn contender(
    tensors: &Tensors,
    place: &Place,
    name: &str,
    format: &str,
    fusion: Fusion,
) -> Result<Contender> {
    let quantized = Quantized::new(tensors, format.parse()?)?;
    Ok(Contender::new(
        name,
        tensors.expected(&quantized.picked, LIMIT)?,
        tensors.through(quantized.projections(place, tensors, fusion)?),
    ))
}

fn contenders(
    place: &Place,
    product: &Product,
    (m, dtype): (usize, DType),
    (format, stock): (&str, &str),
) -> Result<Vec<Contender>> {
    let tensors = Tensors::new(place, product, m, dtype)?;
    let fused = fused(&tensors, place, format)?.in_graph(m);
    // candle has no blocks for activations of 16 bits, and a GPU's yardstick is the dense product.
    let other = match place.device.is_cuda() && dtype != DType::F32 {
        true => tensors.library()?,
        // On CUDA its products of 8 and 16 rows with Q4_0 and Q4_1 are off by up to 6 % of the largest output.
        false => contender(&tensors, place, CANDLE, stock, Fusion::none())?
            .doubted(place.device.is_cuda()),
    };
    Ok(vec![other, fused])
}

/// A matrix on its way to a device.
enum Source {
    Blocks(GgmlDType, Vec<u8>),
    Codes(Codes),
}

impl Source {
    fn bytes(&self) -> usize {
        match self {
            Self::Blocks(_, bytes) => bytes.len(),
            Self::Codes(codes) => codes.nominal_bytes(),
        }
    }

    fn make(&self, device: &Device, shape: (usize, usize)) -> Result<LinearWeight> {
        Ok(match self {
            Self::Blocks(block, bytes) => {
                let storage = QStorage::from_data(bytes.into(), device, *block)?;
                LinearWeight::Quantized(Arc::new(QTensor::new(storage, shape)?))
            }
            #[cfg(feature = "cuda")]
            Self::Codes(codes) if device.is_cuda() => {
                let matrix = candle_fused::cuda::BlockMatrix::from_codes(codes, device)?;
                LinearWeight::Packed(Weight::Blocks(Arc::new(matrix)))
            }
            Self::Codes(codes) => {
                let matrix = PackedMatrix::from_codes(codes)?;
                LinearWeight::Packed(Weight::Packed(Arc::new(matrix)))
            }
        })
    }
}

/// The weights of a product in a format.
struct Quantized {
    matrices: Vec<(Source, (usize, usize))>,
    /// Rows that are checked, dequantized on the host.
    picked: Vec<Tensor>,
}

impl Quantized {
    fn new(tensors: &Tensors, format: Quantization) -> Result<Self> {
        let (mut matrices, mut picked) = (Vec::new(), Vec::new());
        for (dense, places) in tensors.first().iter().zip(tensors.outputs()) {
            let (rows, cols) = dense.dims2()?;
            let few = dense.narrow(0, 0, DISTINCT.min(rows))?;
            let few = few.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
            let (source, values) = quantized(&few, rows, format)?;
            let places: Vec<_> = places.iter().map(|p| p % few.dims()[0]).collect();
            picked.push(rows_of(&values, &places)?);
            matrices.push((source, (rows, cols)));
        }
        Ok(Self { matrices, picked })
    }

    /// As many as take turns.
    fn projections(
        &self,
        place: &Place,
        tensors: &Tensors,
        fusion: Fusion,
    ) -> Result<Vec<Projection>> {
        let bytes = self.matrices.iter().map(|(source, _)| source.bytes()).sum();
        let make = |_| {
            let matrices = self.matrices.iter();
            let weights = matrices.map(|(source, shape)| source.make(&place.device, *shape));
            Projection::new(
                weights.collect::<Result<_>>()?,
                tensors.bias.clone(),
                fusion,
            )
        };
        (0..place.turns(bytes)).map(make).collect()
    }
}

/// A matrix of `rows` rows that repeats the `few`, and their values as they are read back.
fn quantized(few: &Tensor, rows: usize, format: Quantization) -> Result<(Source, Tensor)> {
    fn repeated<T: Copy>(few: &[T], (from, to): (usize, usize)) -> Vec<T> {
        few.iter()
            .copied()
            .cycle()
            .take(few.len() * to / from)
            .collect()
    }
    let (from, cols) = few.dims2()?;
    Ok(match format {
        Quantization::Gguf(block) => {
            let tensor = QTensor::quantize(few, block)?;
            let bytes = repeated(&tensor.data()?, (from, rows));
            (
                Source::Blocks(block, bytes),
                tensor.dequantize(&Device::Cpu)?,
            )
        }
        other => {
            let Some(scheme) = other.scheme() else {
                bail!("{other} is neither a GGUF type nor a scheme");
            };
            let codes = quantize(&few.flatten_all()?.to_vec1::<f32>()?, from, cols, scheme)?;
            let values = Tensor::from_vec(codes.dequantize(), few.dims(), &Device::Cpu)?;
            let lines = |rows: usize| match scheme {
                Scheme::Fp8Block128 => rows.div_ceil(DISTINCT),
                Scheme::Ternary {
                    scale: TernaryScale::Tensor,
                } => 1,
                _ => rows,
            };
            let codes = Codes {
                rows,
                codes: repeated(&codes.codes, (from, rows)),
                scales: repeated(&codes.scales, (lines(from), lines(rows))),
                zeros: repeated(&codes.zeros, (from, rows)),
                group_scales: repeated(&codes.group_scales, (from, rows)),
                ..codes
            };
            (Source::Codes(codes), values)
        }
    })
}
