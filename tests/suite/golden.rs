//! Reference outputs of tiny models, and how far a tensor is from them.

use crate::common::distance::Distance;
use crate::support::device;
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;
use std::collections::HashMap;
use std::path::PathBuf;

/// A model folder under tests/data/goldens.
pub struct Golden {
    pub name: String,
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
        Ok(Self {
            name: name.to_owned(),
            folder,
            outputs,
        })
    }

    pub fn config<C: serde::de::DeserializeOwned>(&self) -> C {
        let text = std::fs::read_to_string(self.folder.join("config.json")).expect("config.json");
        serde_json::from_str(&text).expect("a configuration")
    }

    /// `model_type` of the configuration.
    pub fn model_type(&self) -> String {
        let config: serde_json::Value = self.config();
        config["model_type"].as_str().expect("a name").to_owned()
    }

    /// The weights in `dtype`, on the device in hand.
    pub fn weights(&self, dtype: DType) -> Result<VarBuilder<'static>> {
        let file = std::fs::read(self.folder.join("model.safetensors"))?;
        VarBuilder::from_buffered_safetensors(file, dtype, &device())
    }

    pub fn input_ids(&self) -> Result<Tensor> {
        self.outputs["input_ids"]
            .to_dtype(DType::U32)?
            .to_device(&device())
    }
}

/// `max |a - b| / max |b|`; an error if one of them is not finite.
pub fn relative_error(a: &Tensor, b: &Tensor) -> Result<f64> {
    Ok(Distance::between(a, b)?.relative())
}

/// A NaN or an infinity is seen wherever it stands, on either side.
#[test]
fn values_that_are_not_finite_are_no_agreement() -> Result<()> {
    let good = Tensor::new(&[1f32, 2., 3.], &Device::Cpu)?;
    assert_eq!(relative_error(&good, &good)?, 0.);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for at in 0..3 {
            let mut values = [1f32, 2., 3.];
            values[at] = bad;
            let bad = Tensor::new(&values, &Device::Cpu)?;
            for (a, b) in [(&good, &bad), (&bad, &good), (&bad, &bad)] {
                let error = relative_error(a, b).unwrap_err().to_string();
                assert!(error.contains("finite"), "{error}");
            }
        }
    }
    Ok(())
}
