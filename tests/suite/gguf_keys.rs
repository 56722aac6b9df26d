//! What a GGUF file's metadata may say: architectures of other names, scaled frequencies, windows.

use crate::gguf_file::bytes;
use crate::golden::{Golden, relative_error};
use crate::subject::{ALL, Subject, gguf};
use crate::support::{device, on_every_device};
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::{DType, Result, Tensor};
use candle_fused::Fusion;
use candle_fused::generation::Options;
use candle_fused::models::{GgufModel, llama, mistral, quantized_llama, quantized_qwen3, qwen2};
use candle_transformers::models::quantized_llama as stock;
use std::io::Cursor;

/// A golden's file in f32 with other metadata.
struct File {
    bytes: Vec<u8>,
    content: Content,
}

impl File {
    fn of(golden: &Golden) -> Result<Self> {
        let bytes = bytes(golden, GgmlDType::F32)?;
        let content = Content::read(&mut Cursor::new(&bytes))?;
        Ok(Self { bytes, content })
    }

    fn with(mut self, key: &str, value: Value) -> Self {
        self.content.metadata.insert(key.into(), value);
        self
    }

    fn load<C: candle_fused::models::Architecture>(self, fusion: Fusion) -> Result<GgufModel<C>> {
        let mut reader = Cursor::new(&self.bytes);
        GgufModel::from_gguf_fused(self.content, &mut reader, &device(), fusion)
    }

    fn stock(self) -> Result<stock::ModelWeights> {
        stock::ModelWeights::from_gguf(self.content, &mut Cursor::new(&self.bytes), &device())
    }
}

fn text(name: &str) -> Value {
    Value::String(name.into())
}

/// Keys of Llama's under another architecture are read as candle-transformers reads them: the name
/// decides which dimensions form a pair.
#[test]
fn architectures_of_other_names_are_candle_transformers() -> Result<()> {
    on_every_device(|| {
        let golden = Golden::open("llama_gqa_tied")?;
        let ids = golden.input_ids()?.narrow(0, 0, 1)?;
        for name in ["llama", "mistral", "somebodys", "qwen2", "phi3"] {
            let file = || -> Result<File> {
                Ok(File::of(&golden)?.with("general.architecture", text(name)))
            };
            let want = file()?.stock()?.forward(&ids, 0)?;
            let got = file()?
                .load::<llama::Config>(Fusion::all())?
                .forward(&ids, 0)?;
            let error = relative_error(&got, &want)?;
            assert!(error < 1e-5, "{name}: {error:e}");
        }
        let mut unnamed = File::of(&golden)?;
        unnamed.content.metadata.remove("general.architecture");
        unnamed.load::<llama::Config>(Fusion::all())?;
        Ok(())
    })
}

/// Single tokens at positions past what is cached are rotated by these, and stand in the next slot.
#[test]
fn positions_that_run_ahead_are_candle_transformers() -> Result<()> {
    on_every_device(|| {
        let golden = Golden::open("llama_gqa_tied")?;
        let ids = golden.input_ids()?.narrow(0, 0, 1)?;
        for fusion in [Fusion::all(), Fusion::none()] {
            let mut want = File::of(&golden)?.stock()?;
            let mut got = File::of(&golden)?.load::<llama::Config>(fusion)?;
            for (start, len, position) in [(0, 6, 0), (6, 1, 7), (7, 1, 8), (8, 1, 12)] {
                let chunk = ids.narrow(1, start, len)?;
                let want = want.forward(&chunk, position)?;
                let error = relative_error(&got.forward(&chunk, position)?, &want)?;
                assert!(error < 1e-5, "{fusion} {position}: {error:e}");
            }
        }
        Ok(())
    })
}

/// Mistral's keys may have its own prefix, also where the architecture is a Llama's by name.
#[test]
fn mistral_is_read_by_either_prefix() -> Result<()> {
    on_every_device(|| {
        let golden = Golden::open("mistral_window")?;
        let ids = golden.input_ids()?.narrow(0, 0, 1)?;
        let renamed = || -> Result<File> {
            let mut file = File::of(&golden)?;
            let keys: Vec<_> = file.content.metadata.drain().collect();
            let own = keys
                .into_iter()
                .map(|(key, value)| match key.strip_prefix("llama.") {
                    Some(key) => (format!("mistral.{key}"), value),
                    None => (key, value),
                });
            file.content.metadata.extend(own);
            Ok(file)
        };
        let mut as_llama = File::of(&golden)?.load::<mistral::Config>(Fusion::all())?;
        let want = as_llama.forward(&ids, 0)?.to_vec2::<f32>()?;
        for name in ["mistral", "llama"] {
            let file = renamed()?.with("general.architecture", text(name));
            let got = file
                .load::<mistral::Config>(Fusion::all())?
                .forward(&ids, 0)?;
            assert_eq!(got.to_vec2::<f32>()?, want);
        }
        let refused = |file: File| -> String {
            let loaded = file.load::<mistral::Config>(Fusion::all());
            loaded.expect_err("accepted").to_string()
        };
        // What is wrong is named as the file has it.
        let said = refused(renamed()?.with("mistral.block_count", Value::U32(9)));
        assert!(said.contains("mistral.block_count is 9"), "{said}");
        // The module that a Llama's error points to is the one that takes it.
        let file = renamed()?.with("general.architecture", text("mistral"));
        let said = file
            .load::<llama::Config>(Fusion::all())
            .expect_err("accepted");
        let said = said.to_string();
        assert!(
            said.contains("`candle_fused::models::mistral` takes it"),
            "{said}"
        );
        let mut other = renamed()?.with("general.architecture", text("mamba"));
        other
            .content
            .metadata
            .retain(|key, _| !key.starts_with("mistral."));
        let said = refused(other);
        assert!(said.contains("expected `llama` or `mistral`"), "{said}");
        Ok(())
    })
}

/// A file of another architecture says who takes it.
#[test]
fn a_file_of_another_architecture_names_its_module() -> Result<()> {
    let refused = |golden: &str, name: &str| -> Result<String> {
        let golden = Golden::open(golden)?;
        let file = File::of(&golden)?.with("general.architecture", text(name));
        Ok(file
            .load::<llama::Config>(Fusion::all())
            .expect_err("accepted")
            .to_string())
    };
    let said = refused("qwen3_qknorm", "qwen3")?;
    assert!(said.contains("`qwen3`, expected `llama`"), "{said}");
    assert!(
        said.contains("`candle_fused::models::qwen3` takes it"),
        "{said}"
    );
    let said = refused("gpt_neox_parallel", "gptneox")?;
    assert!(said.contains("models::gpt_neox`"), "{said}");
    let said = refused("qwen3_qknorm", "mamba")?;
    assert!(said.contains("no module"), "{said}");
    // Norms of the heads that nobody would apply.
    let golden = Golden::open("qwen3_qknorm")?;
    let mut file = File::of(&golden)?;
    let keys: Vec<_> = file.content.metadata.drain().collect();
    for (key, value) in keys {
        file.content
            .metadata
            .insert(key.replace("qwen3.", "qwen2."), value);
    }
    let said = file
        .load::<qwen2::Config>(Fusion::all())
        .expect_err("accepted")
        .to_string();
    assert!(said.contains("attn_q_norm"), "{said}");
    Ok(())
}

/// Every dimension turns `factor` times slower: positions that many times as far apart give the same.
#[test]
fn linear_scaling_divides_frequencies() -> Result<()> {
    on_every_device(|| {
        let golden = Golden::open("llama_gqa_tied")?;
        let ids = golden.input_ids()?.narrow(0, 0, 1)?;
        let tokens = ids.dim(1)?;
        let factor = |value: f32| Value::F32(value);
        let forms: [&[(&str, Value)]; 4] = [
            &[("llama.rope.scale_linear", factor(4.))],
            &[("llama.rope.scaling.factor", factor(4.))],
            &[
                ("llama.rope.scaling.type", text("linear")),
                ("llama.rope.scaling.factor", factor(4.)),
            ],
            &[
                ("llama.rope.scaling.factor", factor(0.)),
                ("llama.rope.scale_linear", factor(4.)),
            ],
        ];
        let mut unscaled = File::of(&golden)?.load::<llama::Config>(Fusion::all())?;
        let unscaled = unscaled.forward(&ids, 0)?;
        let mut all = Vec::new();
        for form in forms {
            let file = form.iter().fold(File::of(&golden)?, |file, (key, value)| {
                file.with(key, value.clone())
            });
            let mut model = file.load::<llama::Config>(Fusion::all())?;
            let logits = model.forward(&ids, 0)?;
            assert!(relative_error(&logits, &unscaled)? > 1e-4);
            all.push(logits);
        }
        for logits in &all[1..] {
            assert_eq!(logits.to_vec2::<f32>()?, all[0].to_vec2::<f32>()?);
        }
        // At four times the position, the scaled model turns as far as the other.
        let scaled = || {
            File::of(&golden)?
                .with("llama.rope.scale_linear", factor(4.))
                .load(Fusion::all())
        };
        let (mut sparse, mut dense): (GgufModel<llama::Config>, GgufModel<llama::Config>) =
            (scaled()?, File::of(&golden)?.load(Fusion::all())?);
        let most = tokens.min((dense.max_positions() - 1) / 4);
        for i in 0..most {
            let token = ids.narrow(1, i, 1)?;
            let (got, want) = (sparse.forward(&token, 4 * i)?, dense.forward(&token, i)?);
            let error = relative_error(&got, &want)?;
            assert!(error < 1e-4, "{i}: {error:e}");
        }
        for (key, value, said) in [
            ("llama.rope.scaling.type", text("yarn"), "`yarn`"),
            ("llama.rope.scaling.type", Value::U32(1), "expected a name"),
            ("llama.rope.scaling.factor", Value::F32(-2.), "above 0"),
            ("llama.rope.scale_linear", Value::F32(f32::NAN), "above 0"),
        ] {
            let loaded = File::of(&golden)?
                .with(key, value)
                .load::<llama::Config>(Fusion::all());
            let error = loaded.expect_err(key).to_string();
            assert!(error.contains(said), "{error}");
        }
        File::of(&golden)?
            .with("llama.rope.scaling.type", text("none"))
            .with("llama.rope.scaling.factor", factor(4.))
            .load::<llama::Config>(Fusion::all())?;
        Ok(())
    })
}

/// A file's window holds in every layer, through prompts, single tokens and the token loop.
#[test]
fn windows_of_files_hold_however_tokens_come() -> Result<()> {
    on_every_device(|| {
        for name in ALL {
            let golden = Golden::open(name)?;
            let ids = golden.input_ids()?.narrow(0, 0, 1)?;
            let tokens = ids.dim(1)?;
            let load = |window: u32, fusion| -> Result<Box<dyn Subject>> {
                let file = File::of(&golden)?;
                let arch = match golden.model_type().as_str() {
                    "gpt_neox" => "gptneox".to_owned(),
                    "mistral" => "llama".to_owned(),
                    other => other.to_owned(),
                };
                let key = format!("{arch}.attention.sliding_window");
                gguf(&golden, &rewritten(file, &key, window)?, fusion)
            };
            let whole = load(0, Fusion::all())?.forward(&ids, 0)?;
            let want = load(5, Fusion::none())?.forward(&ids, 0)?;
            assert!(relative_error(&want, &whole)? > 1e-4, "{name}");
            let mut model = load(5, Fusion::all())?;
            for chunks in [vec![tokens], vec![1; tokens], vec![4, 1, tokens - 5]] {
                model.clear()?;
                let (mut position, mut got) = (0, whole.clone());
                for chunk in chunks {
                    got = model.forward(&ids.narrow(1, position, chunk)?, position)?;
                    position += chunk;
                }
                let error = relative_error(&got, &want)?;
                assert!(error < 1e-4, "{name}: {error:e}");
            }
            let prompt = ids.get(0)?.to_vec1::<u32>()?;
            let options = Options {
                positions: Some(64),
                ..Default::default()
            };
            let mut generation = model.generation(&options)?;
            let mut drawn = vec![generation.extend(0, &prompt)?];
            while drawn.len() < 8 {
                drawn.extend(generation.step()?[0]);
            }
            let mut plain = load(5, Fusion::none())?;
            let mut text = prompt;
            for token in drawn {
                let input = Tensor::new(text.as_slice(), &device())?.unsqueeze(0)?;
                let logits = plain.forward(&input, 0)?.flatten_all()?.to_vec1::<f32>()?;
                let best = logits.iter().copied().fold(f32::MIN, f32::max);
                assert!(best - logits[token as usize] < 1e-3, "{name}");
                text.push(token);
            }
        }
        Ok(())
    })
}

/// The file's bytes with a number more in its metadata.
fn rewritten(file: File, key: &str, number: u32) -> Result<Vec<u8>> {
    use candle_core::quantized::gguf_file;
    let File { bytes, content } = file.with(key, Value::U32(number));
    let mut reader = Cursor::new(&bytes);
    let tensors = content
        .tensor_infos
        .keys()
        .map(|name| {
            Ok((
                name,
                content.tensor(&mut reader, name, &candle_core::Device::Cpu)?,
            ))
        })
        .collect::<Result<Vec<_>>>()?;
    let tensors: Vec<_> = tensors.iter().map(|(name, t)| (name.as_str(), t)).collect();
    let metadata: Vec<_> = content
        .metadata
        .iter()
        .map(|(k, v)| (k.as_str(), v))
        .collect();
    let mut out = Cursor::new(Vec::new());
    gguf_file::write(&mut out, &metadata, &tensors)?;
    Ok(out.into_inner())
}

/// A pattern of windows is refused, and so is a file's window where a dense checkpoint is asked for.
#[test]
fn windows_that_cannot_be_said_are_named() -> Result<()> {
    let golden = Golden::open("llama_gqa_tied")?;
    let patterned = File::of(&golden)?.with(
        "llama.attention.sliding_window_pattern",
        Value::Array(vec![Value::Bool(true)]),
    );
    let loaded = patterned.load::<llama::Config>(Fusion::all());
    let error = loaded.expect_err("accepted").to_string();
    assert!(error.contains("sliding_window_pattern"), "{error}");
    for (key, value) in [
        ("llama.attention.sliding_window", Value::U32(4)),
        ("llama.rope.scale_linear", Value::F32(2.)),
    ] {
        let file = File::of(&golden)?.with(key, value);
        let error = llama::gguf_config(&file.content)
            .expect_err(key)
            .to_string();
        assert!(error.contains("no configuration"), "{error}");
    }
    Ok(())
}

/// Configurations under another name load where their fields say all, and are refused where they do not.
#[test]
fn configurations_of_other_names_are_read_by_their_fields() {
    let llama = |rest: &str| {
        let text = format!(
            r#"{{"hidden_size":64,"intermediate_size":128,"vocab_size":256,"num_hidden_layers":2,
            "num_attention_heads":4,"rms_norm_eps":1e-5,"max_position_embeddings":512,
            "rope_theta":1e4,{rest}}}"#
        );
        serde_json::from_str::<llama::LlamaConfig>(&text).map_err(|e| e.to_string())
    };
    for fine in [
        r#""model_type":"somebodys","hidden_act":"silu""#,
        r#""model_type":"mistral","sliding_window":null"#,
        r#""model_type":"mistral","sliding_window":512"#,
        r#""model_type":"qwen2","sliding_window":64,"use_sliding_window":false"#,
        r#""model_type":"granite","embedding_multiplier":1.0,"logits_scaling":1"#,
        r#""logit_scale":null,"num_experts":0"#,
    ] {
        assert!(llama(fine).is_ok(), "{fine}: {:?}", llama(fine).err());
    }
    for (other, said) in [
        (r#""model_type":"qwen3""#, "candle_fused::models::qwen3"),
        (r#""model_type":"gemma2""#, "no module"),
        (r#""attention_multiplier":1.0"#, "attention_multiplier is 1"),
        (r#""sliding_window":64"#, "sliding_window is 64"),
        (
            r#""model_type":"granite","embedding_multiplier":12.0"#,
            "embedding_multiplier is 12",
        ),
        (r#""num_local_experts":8"#, "num_local_experts is 8"),
        (r#""no_rope_layers":[1,0]"#, "no_rope_layers"),
        (
            r#""final_logit_softcapping":30.0"#,
            "final_logit_softcapping is 30",
        ),
        (r#""hidden_act":"gelu""#, "hidden_act is `gelu`"),
        (
            r#""rope_scaling":{"type":"linear","factor":2.0}"#,
            "`linear`",
        ),
    ] {
        let error = llama(other).expect_err(other);
        assert!(error.contains(said), "{other}: {error}");
    }
}

/// The modules under candle-transformers' names are these models.
#[test]
fn modules_of_quantized_models_take_their_files() -> Result<()> {
    let golden = Golden::open("llama_gqa_tied")?;
    let (file, ids) = (
        File::of(&golden)?,
        golden.outputs["input_ids"].to_dtype(DType::U32)?,
    );
    let cpu = candle_core::Device::Cpu;
    let mut reader = Cursor::new(&file.bytes);
    let mut model = quantized_llama::ModelWeights::from_gguf(file.content, &mut reader, &cpu)?;
    let logits = model.forward(&ids, 0)?;
    assert_eq!(logits.dims(), [2, model.vocab_size()]);
    let golden = Golden::open("qwen3_qknorm")?;
    let file = File::of(&golden)?;
    let mut reader = Cursor::new(&file.bytes);
    quantized_qwen3::ModelWeights::from_gguf(file.content, &mut reader, &cpu)?;
    Ok(())
}
