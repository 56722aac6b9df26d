//! The models that faults are tried on.

use crate::gguf_file;
use crate::golden::Golden;
use crate::subject::{self, Subject};
use crate::support::on;
use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Result};
use candle_fused::Fusion;
use candle_fused::models::llama::{Cache, Llama, LlamaConfig};
use candle_fused::quant::Recipe;

type Load = Box<dyn Fn() -> Result<Box<dyn Subject>>>;

/// A model that can be loaded again and again.
pub struct Tiny {
    pub name: &'static str,
    /// Whether it runs in candle's own operations.
    pub plain: bool,
    load: Load,
}

impl Tiny {
    pub fn load(&self, device: &Device) -> Result<Box<dyn Subject>> {
        on(device, || (self.load)())
    }
}

/// A llama in bf16, in INT4 and as a GGUF file, a GPT-NeoX whose attention and MLP stand side by side, and a
/// llama in candle's own operations.
pub fn all() -> Result<Vec<Tiny>> {
    Ok(vec![
        dense("llama_gqa_tied", DType::BF16, Fusion::all())?,
        int4()?,
        gguf()?,
        dense("gpt_neox_parallel", DType::F16, Fusion::all())?,
        dense("llama_gqa_tied", DType::F32, Fusion::none())?,
    ])
}

/// A golden model from its safetensors.
fn dense(name: &'static str, dtype: DType, fusion: Fusion) -> Result<Tiny> {
    let golden = Golden::open(name)?;
    let plain = fusion.is_none();
    Ok(Tiny {
        name: if plain { "plain candle" } else { name },
        plain,
        load: Box::new(move || subject::dense(&golden, dtype, fusion)),
    })
}

fn int4() -> Result<Tiny> {
    Ok(Tiny {
        name: "INT4",
        plain: false,
        load: Box::new(|| {
            let (model, config) = llama_int4()?;
            let device = crate::support::device();
            let cache = Cache::new(true, DType::BF16, &config, &device)?;
            Ok(Box::new((model, cache)))
        }),
    })
}

fn llama_int4() -> Result<(Llama, candle_fused::models::llama::Config)> {
    let golden = Golden::open("llama_gqa_tied")?;
    let config = golden.config::<LlamaConfig>().into_config(false);
    // Rows of `down_proj` divide by no group.
    let recipe = Recipe::new("int4-g32".parse()?)
        .with("*.down_proj.weight", Some("int8".parse()?))
        .with_head("int4-g32".parse()?);
    let weights = golden.weights(DType::BF16)?;
    let model = Llama::load_quantized(weights, &config, &recipe, Fusion::all())?;
    Ok((model, config))
}

/// In INT4, on its own, so that threads can share it.
pub fn shared(device: &Device) -> Result<Llama> {
    on(device, || llama_int4().map(|(model, _)| model))
}

fn gguf() -> Result<Tiny> {
    let golden = Golden::open("llama3_rope")?;
    let bytes = gguf_file::bytes(&golden, GgmlDType::Q4_0)?;
    Ok(Tiny {
        name: "GGUF Q4_0",
        plain: false,
        load: Box::new(move || subject::gguf(&golden, &bytes, Fusion::all())),
    })
}
