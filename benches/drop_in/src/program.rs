// A program on candle-transformers, as candle's examples `quantized` and `llama` go about it. It is compiled twice:
// `models` is candle_transformers' in one of its modules and candle_fused's in the other.

use models::llama::{Cache, Config, Llama, LlamaConfig};
use models::quantized_llama::ModelWeights;

/// The model of a GGUF file as it is.
pub fn gguf(path: &Path, device: &Device) -> Result<Box<dyn Model>> {
    let mut file = File::open(path)?;
    let content = Content::read(&mut file)?;
    Ok(Box::new(ModelWeights::from_gguf(content, &mut file, device)?))
}

impl Model for ModelWeights {
    fn restart(&mut self) -> Result<()> {
        self.clear_kv_cache();
        Ok(())
    }

    fn forward(&mut self, ids: &Tensor, position: usize) -> Result<Tensor> {
        Ok(ModelWeights::forward(self, ids, position)?.squeeze(0)?)
    }
}

struct Dense {
    model: Llama,
    cache: Cache,
    config: Config,
    dtype: DType,
    device: Device,
}

/// The model of a checkpoint.
pub fn dense(checkpoint: &Checkpoint, use_flash_attn: bool) -> Result<Box<dyn Model>> {
    let (dtype, device) = (checkpoint.dtype, checkpoint.device.clone());
    let config: LlamaConfig = serde_json::from_value(checkpoint.config.clone())?;
    let config = config.into_config(use_flash_attn);
    let vb = VarBuilder::from_tensors(checkpoint.tensors.clone(), dtype, &device);
    Ok(Box::new(Dense {
        model: Llama::load(vb, &config)?,
        cache: Cache::new(true, dtype, &config, &device)?,
        config,
        dtype,
        device,
    }))
}

impl Model for Dense {
    fn restart(&mut self) -> Result<()> {
        self.cache = Cache::new(true, self.dtype, &self.config, &self.device)?;
        Ok(())
    }

    fn forward(&mut self, ids: &Tensor, position: usize) -> Result<Tensor> {
        Ok(self.model.forward(ids, position, &mut self.cache)?.squeeze(0)?)
    }
}
