//! Reference outputs of tiny models, and how far a tensor is from them.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;
use std::collections::HashMap;
use std::path::PathBuf;

/// A model folder under tests/data/goldens.
pub struct Golden {
    pub folder: PathBuf,
    pub outputs: HashMap<String, Tensor>,
}

impl Golden {
    pub fn open(name: &str) -> Result<Self> {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
            .join("tests/data/goldens")
            .join(name);
        let outputs =
            candle_core::safetensors::load(folder.join("golden.safetensors"), &Device::Cpu)?;
        Ok(Self { folder, outputs })
    }

    pub fn config<C: serde::de::DeserializeOwned>(&self) -> C {
        let text = std::fs::read_to_string(self.folder.join("config.json")).expect("config.json");
        serde_json::from_str(&text).expect("a configuration")
    }

    /// The weights in `dtype`.
    pub fn weights(&self, dtype: DType) -> Result<VarBuilder<'static>> {
        let file = std::fs::read(self.folder.join("model.safetensors"))?;
        VarBuilder::from_buffered_safetensors(file, dtype, &Device::Cpu)
    }

    pub fn input_ids(&self) -> Result<Tensor> {
        self.outputs["input_ids"].to_dtype(DType::U32)
    }

    pub fn hidden_state(&self, layer: usize) -> Result<Tensor> {
        self.outputs["hidden_states"].get(layer)
    }
}

/// `max |a - b| / max |b|`
pub fn relative_error(a: &Tensor, b: &Tensor) -> Result<f64> {
    assert_eq!(a.dims(), b.dims());
    let (a, b) = (a.to_dtype(DType::F64)?, b.to_dtype(DType::F64)?);
    let top = |t: Tensor| t.abs()?.flatten_all()?.max(0)?.to_scalar::<f64>();
    Ok(top((a - &b)?)? / top(b)?)
}
