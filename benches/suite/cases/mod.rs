//! The cases: an op on the shapes of a model, what it replaces, and the right result.

mod attention;
mod dims;
mod elementwise;
mod kernels;
mod paged;
mod picked;
mod pools;
mod products;
mod quantized;
mod sweep;
mod varlen;

pub use attention::Attention;
pub use dims::Dims;
pub use kernels::{Grid, KernelCase, rows_of_large};
pub use picked::Expected;
pub use products::{Part, Product, Tensors};
pub use quantized::{GOALS as QUANT_GOALS, weight_bits};
pub use sweep::cases as sweep;

use crate::figures::Work;
use crate::place::Place;
use candle_core::{DType, Result, Tensor};
use common::shapes::Shape;

/// The stem of every op, in the order of the table.
pub const OPS: [&str; 16] = [
    "residual_add",
    "rms_norm",
    "layer_norm",
    "rope",
    "rms_norm_linear",
    "layer_norm_linear",
    "linear",
    "quant_linear",
    "flash_attention",
    "flash_attention_varlen",
    "flash_decoding",
    "paged_append",
    "paged_attention",
    "paged_prefill",
    "sample",
    "logprobs",
];

/// The models whose shapes are measured.
pub const MODELS: [Shape; 5] = [
    Shape::SmolLm2,
    Shape::Qwen3,
    Shape::Llama1b,
    Shape::Pythia28b,
    Shape::Llama8b,
];

/// Ops and shapes that have to come near the bandwidth of a copy on a GPU.
pub const SHARE_GOALS: [(&str, &str); 7] = [
    ("rms_norm", "16384x4096"),
    ("residual_add", "16384x4096"),
    ("flash_decoding", "32 heads of 64"),
    ("flash_decoding", "32 heads of 80"),
    ("flash_decoding", "32 heads of 96"),
    ("flash_decoding", "32 heads of 128"),
    ("flash_decoding", "32 heads of 256"),
];

/// Rows up to which products are timed in a graph too.
const IN_GRAPH: usize = 16;

/// A call of a contender with what has its turn.
pub type Call = Box<dyn Fn(usize) -> Result<Vec<Tensor>>>;

/// One way of computing a case.
pub struct Contender {
    pub name: String,
    pub call: Call,
    /// What each of its results has to be.
    pub expected: Vec<Expected>,
    /// Whether it is timed in a CUDA graph too, as decoding replays it.
    pub in_graph: bool,
    /// Whether it is known to be wrong at times, and is left out then.
    pub doubted: bool,
}

impl Contender {
    pub fn new(
        name: &str,
        expected: Vec<Expected>,
        call: impl Fn(usize) -> Result<Vec<Tensor>> + 'static,
    ) -> Self {
        Self {
            name: name.to_owned(),
            call: Box::new(call),
            expected,
            in_graph: false,
            doubted: false,
        }
    }

    /// The same, left out where its results are wrong if it is `doubted`.
    pub fn doubted(self, doubted: bool) -> Self {
        Self { doubted, ..self }
    }

    /// The same, timed in a graph too.
    pub fn recorded(self) -> Self {
        Self {
            in_graph: true,
            ..self
        }
    }

    /// The same, timed in a graph too if it has few enough rows: so many sequences decode side by side.
    pub fn in_graph(self, rows: usize) -> Self {
        Self {
            in_graph: rows <= IN_GRAPH,
            ..self
        }
    }
}

/// Makes the tensors of a case.
type Build = Box<dyn Fn(&Place) -> Result<Vec<Contender>>>;

/// An op on one shape.
pub struct Case {
    pub op: &'static str,
    pub model: String,
    /// The part of a layer, or what else tells the case from others of the op.
    pub part: String,
    /// Rows of the input: tokens, or sequences that decode side by side.
    pub rows: usize,
    /// Keys that are attended to; 0 elsewhere.
    pub context: usize,
    /// The dtype or weight format.
    pub format: String,
    pub work: Work,
    pub build: Build,
}

impl Case {
    /// As `rms_norm_linear smollm2-135m gate_up m1 f32`.
    pub fn name(&self) -> String {
        let context = match self.context {
            0 => String::new(),
            context => format!(" c{context}"),
        };
        format!(
            "{} {} {} m{}{context} {}",
            self.op, self.model, self.part, self.rows, self.format
        )
    }
}

/// How many of the shapes are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    Quick,
    Full,
}

impl Extent {
    pub fn of(quick: bool) -> Self {
        if quick { Self::Quick } else { Self::Full }
    }

    /// Rows of products and of what stands between them.
    fn rows(self) -> &'static [usize] {
        match self {
            Self::Quick => &[1, 128],
            Self::Full => &[1, 8, 128, 512, 2048],
        }
    }

    /// Keys in front of a decode step.
    fn contexts(self) -> &'static [usize] {
        match self {
            Self::Quick => &[128, 1024],
            Self::Full => &[128, 512, 2048, 4096, 16384],
        }
    }

    /// Tokens of prompts.
    fn prompts(self) -> &'static [usize] {
        match self {
            Self::Quick => &[128],
            Self::Full => &[128, 512, 2048, 4096, 16384],
        }
    }

    /// The models.
    pub fn models(self) -> &'static [Shape] {
        match self {
            Self::Quick => &MODELS[..1],
            Self::Full => &MODELS,
        }
    }
}

/// All cases, op by op; those of the goals first, since a budget may end before the others do.
pub fn all(place: &Place, extent: Extent) -> Result<Vec<Case>> {
    let mut cases = Vec::new();
    let mut models = extent.models().to_vec();
    if extent == Extent::Quick {
        // The smallest with layer norms.
        models.push(Shape::Pythia160m);
    }
    for shape in models {
        let dims = Dims::of(shape)?;
        for dtype in &place.dtypes {
            cases.extend(elementwise::cases(&dims, *dtype, extent));
            cases.extend(products::cases(&dims, *dtype, extent));
            cases.extend(attention::cases(&dims, *dtype, extent));
            cases.extend(varlen::cases(&dims, *dtype, extent));
            cases.extend(paged::cases(&dims, *dtype, extent));
        }
        cases.push(elementwise::sample(&dims));
        cases.push(elementwise::logprobs(&dims));
        cases.extend(quantized::cases(&dims, place, extent));
    }
    let by_op = |case: &Case| OPS.iter().position(|op| *op == case.op);
    cases.sort_by_key(by_op);
    let mut all = Vec::new();
    if place.device.is_cuda() && extent == Extent::Full {
        all.extend(elementwise::large());
        all.extend(attention::large()?);
        all.extend(paged::large());
        all.extend(quantized::large());
    }
    all.sort_by_key(by_op);
    all.extend(cases);
    Ok(all)
}

/// How far a result may be from the reference, of its largest value: rounding to the dtype on the way,
/// which candle does more often than the ops.
pub fn limit(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 2e-5,
        DType::F16 => 5e-3,
        _ => 4e-2,
    }
}

/// Rows `[B n, H, D]` of sequences of one length as `[B, H, n, D]`.
fn heads_first(rows: &Tensor, sequences: usize) -> Result<Tensor> {
    let (total, heads, dim) = rows.dims3()?;
    let rows = rows.reshape((sequences, total / sequences, heads, dim))?;
    rows.transpose(1, 2)?.contiguous()
}
