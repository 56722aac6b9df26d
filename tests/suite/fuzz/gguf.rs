//! A GGUF file: its header, its metadata, and the model that it holds.

use crate::common::architecture::Architecture;
use crate::common::gguf_vocab;
use candle_core::quantized::gguf_file::Content;
use candle_core::{Device, Result, Tensor};
use candle_fused::Fusion;
use candle_fused::cpu::packed::SharedBytes;
use candle_fused::models::{self, GgufModel, gpt_neox, llama, qwen2, qwen3};
use std::io::Cursor;
use std::sync::Arc;

pub fn run(data: &[u8]) {
    let Ok(mut content) = read(data) else { return };
    let _ = gguf_vocab::tokenizer(&gguf_vocab::take(&mut content));
    let name = gguf_vocab::text(&content, "general.architecture");
    let _ = match name.map(Architecture::named) {
        Some(Ok(Architecture::Llama)) => {
            let _ = llama::dequantize_gguf(
                &content,
                &mut Cursor::new(data),
                candle_core::DType::F32,
                &Device::Cpu,
            );
            load::<llama::Config>(data)
        }
        Some(Ok(Architecture::Qwen2)) => load::<qwen2::Config>(data),
        Some(Ok(Architecture::Qwen3)) => load::<qwen3::Config>(data),
        Some(Ok(Architecture::GptNeox)) => load::<gpt_neox::Config>(data),
        _ => Ok(()),
    };
}

fn read(data: &[u8]) -> Result<Content> {
    Content::read(&mut Cursor::new(data))
}

fn load<C: models::Architecture>(data: &[u8]) -> Result<()> {
    let file: SharedBytes = Arc::new(data.to_vec());
    speak(GgufModel::<C>::from_gguf_in_place(
        read(data)?,
        file,
        Fusion::all(),
    )?)?;
    for fusion in [Fusion::all(), Fusion::none()] {
        let mut reader = Cursor::new(data);
        speak(GgufModel::<C>::from_gguf_fused(
            read(data)?,
            &mut reader,
            &Device::Cpu,
            fusion,
        )?)?;
    }
    Ok(())
}

/// A prompt and a step. Damaged weights may give any numbers, or an error.
fn speak<C: models::Architecture>(mut model: GgufModel<C>) -> Result<()> {
    let ids = |tokens: &[u32]| Tensor::new(tokens, &Device::Cpu)?.unsqueeze(0);
    model.forward(&ids(&[0, 1, 0])?, 0)?;
    model.forward(&ids(&[1])?, 3)?;
    Ok(())
}
