//! Quantizes a model once and saves it, for `--model FOLDER` of the other examples, which use the
//! file in place.
//!
//! ```text
//! cargo run --release --example quantize -- --quantize int4-g64 --head int8 --out smollm2-int4
//! cargo run --release --example quantize -- --model Qwen/Qwen3-0.6B --quantize int8 --out qwen3-int8
//! cargo run --release --example smollm -- --model smollm2-int4
//! cargo run --release --example quantize -- --quantize int4-g64 --layout compressed-tensors --out for-vllm
//! cargo run --release --example quantize -- --quantize int4-g64 --calibrate TEXT.txt --out smollm2-gptq
//! ```
//! With `--calibrate` a text goes through the model, and matrices are rounded so that what they make of it changes least
//! (GPTQ).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow, bail, ensure};
use candle_core::{DType, Device};
use candle_fused::models::{
    self, Calibration, calibrate, llama, save_compressed_tensors, save_quantized,
};
use candle_fused::quant::Recipe;
use candle_nn::VarBuilder;
use clap::{Parser, ValueEnum};
use serde_json::{Value, json};

use common::architecture::Config;
use common::args;
use common::calibrate::CalibrateArgs;
use common::quantize::QuantizeArgs;
use common::report::{self, bytes};
use common::source::{self, DEFAULT_MODEL, ModelFiles, SourceOptions};
use common::tokenizer::Text;
use common::validate;
use common::weights::{self, Checkpoint};
use common::with_config;

/// Quantizes a model and saves it as a folder.
#[derive(Parser, Debug)]
#[command(version, max_term_width = 100)]
struct Args {
    /// A GGUF file, a folder with config.json, tokenizer.json and safetensors, or the id of a model
    /// on the Hugging Face hub.
    #[arg(long)]
    model: Option<String>,

    /// Branch, tag or commit of the model on the hub [default: main].
    #[arg(long)]
    revision: Option<String>,

    /// What stays as numbers is saved in f32, f16 or bf16 [default: as stored].
    #[arg(long, value_parser = args::dtype)]
    dtype: Option<DType>,

    /// The folder to write.
    #[arg(long, value_name = "FOLDER")]
    out: PathBuf,

    /// How the file is laid out: `own`, which the other examples use in place, or `compressed-tensors`, which
    /// vLLM and transformers load too: int8, fp8, fp8-block128, and int4 without zero points.
    #[arg(long, value_enum, default_value = "own")]
    layout: Layout,

    /// CPU threads [default: all that this process may use].
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = args::threads)]
    threads: Option<usize>,

    #[command(flatten)]
    quantize: QuantizeArgs,

    #[command(flatten)]
    calibrate: CalibrateArgs,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    Own,
    CompressedTensors,
}

impl Layout {
    /// Quantizes the model and writes the file; gives what `config.json` has to say of it.
    fn save<C: models::Architecture>(
        self,
        config: &C,
        vb: VarBuilder,
        recipe: &Recipe,
        calibration: Option<&Calibration>,
        target: &Path,
    ) -> Result<Option<Value>> {
        let recipe = match calibration {
            Some(calibration) => &calibrate(config, vb.clone(), recipe, calibration)?,
            None => recipe,
        };
        match self {
            Self::Own => {
                save_quantized(config, vb, recipe, target)?;
                Ok(None)
            }
            Self::CompressedTensors => {
                let config = save_compressed_tensors(config, vb, recipe, target)?;
                Ok(Some(serde_json::from_str(&config)?))
            }
        }
    }
}

fn main() -> ExitCode {
    report::run_main(run)
}

fn run() -> Result<()> {
    let args: Args = args::parse(std::env::args_os(), DEFAULT_MODEL)?;
    args::set_threads(args.threads);
    let recipe = args
        .quantize
        .recipe()
        .context("nothing is to be quantized; give --quantize FORMAT")?;
    let target = args.out.join("model.safetensors");
    ensure!(
        !target.exists(),
        "{} is there already; give another folder as --out",
        target.display()
    );
    let located = source::locate(
        args.model.as_deref(),
        args.revision.as_deref(),
        &SourceOptions::from_env(),
    )?;
    let weights = weights::open(&located.files)?;
    let text = weights.text()?;
    let checkpoint = weights.checkpoint(args.dtype, &Device::Cpu)?;
    fs::create_dir_all(&args.out).with_context(|| format!("cannot make {}", args.out.display()))?;
    beside(&located.files, &checkpoint, &text, &args.out)?;
    let Checkpoint { config, vb, .. } = checkpoint;
    let layout = args.layout;
    let folder = args.out.join("calibration");
    let calibration = args.calibrate.calibration(&text, &folder)?;
    let calibration = calibration.as_ref();
    let quantization = with_config!(
        &config,
        config => layout.save(config, vb, &recipe, calibration, &target),
        config => layout.save(config, vb, &recipe, calibration, &target),
    )?;
    if calibration.is_some() {
        fs::remove_dir_all(&folder)
            .with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    if let Some(quantization) = quantization {
        let path = args.out.join("config.json");
        let mut config = validate::json(&path)?;
        config["quantization_config"] = quantization;
        write_json(&path, &config)?;
    }
    let size = fs::metadata(&target)?.len();
    report::say(format_args!(
        "{} ({}) in {}",
        target.display(),
        bytes(size),
        args.quantize.describe().unwrap_or_default()
    ));
    Ok(())
}

/// Writes what stands beside the weights: copies, or of a GGUF file what transformers would write.
fn beside(files: &ModelFiles, checkpoint: &Checkpoint, text: &Text, out: &Path) -> Result<()> {
    match files {
        ModelFiles::Safetensors(files) => {
            let optional = [
                &files.tokenizer,
                &files.generation_config,
                &files.tokenizer_config,
                &files.chat_template,
            ];
            for file in optional.into_iter().flatten().chain([&files.config]) {
                let name = file.file_name().context("a file without a name")?;
                fs::copy(file, out.join(name))
                    .with_context(|| format!("cannot copy {}", file.display()))?;
            }
            Ok(())
        }
        ModelFiles::Gguf { .. } => {
            let Config::Llama(config) = &checkpoint.config else {
                bail!("of GGUF files only those of llama models can be quantized anew");
            };
            let config = llama_config(config, checkpoint.dtype, text.end_ids());
            write_json(&out.join("config.json"), &config)?;
            write_json(&out.join("tokenizer_config.json"), &text.config())?;
            text.tokenizer()
                .save(out.join("tokenizer.json"), false)
                .map_err(|error| anyhow!("the tokenizer cannot be saved ({error})"))
        }
        ModelFiles::Random(_) => bail!("random weights are not saved"),
    }
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    let text = serde_json::to_string_pretty(value)?;
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

fn llama_config(config: &llama::Config, dtype: DType, end_ids: &[u32]) -> Value {
    let dtype = match dtype {
        DType::F16 => "float16",
        DType::BF16 => "bfloat16",
        _ => "float32",
    };
    json!({
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "hidden_act": "silu",
        "eos_token_id": end_ids,
        "dtype": dtype,
    })
}
