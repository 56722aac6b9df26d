//! Layers that are done, on disk.

use super::Calibration;
use super::steps::Part;
use crate::models::quantized::{Label, QuantizedFile, Saved, save};
use crate::nn::recipe::{Finished, Recipe};
use candle_core::{Result, Tensor, bail};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The version of what is written here.
const VERSION: u64 = 1;

/// A folder of `layer-N.safetensors`, each a [`QuantizedFile`] of a layer's matrices, and `calibration.json`, which says
/// what they were made by.
pub struct Folder(PathBuf);

impl Folder {
    /// Makes the folder, or checks that what is there is of the same calibration.
    pub fn open(
        path: &Path,
        recipe: &Recipe,
        calibration: &Calibration,
        parts: &[Part],
    ) -> Result<Self> {
        let described = describe(recipe, calibration, parts)?;
        let file = path.join("calibration.json");
        match fs::read(&file) {
            Ok(bytes) => {
                let there: Value = serde_json::from_slice(&bytes).unwrap_or_default();
                for (key, expected) in &described {
                    if there[key] != *expected {
                        bail!(
                            "{}: {key} is {}, expected {expected}: delete the folder, or go on as it was begun",
                            file.display(),
                            there[key]
                        );
                    }
                }
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                let described: Value = described.into_iter().collect();
                let written = fs::create_dir_all(path)
                    .and_then(|()| fs::write(&file, format!("{described:#}\n")));
                if let Err(e) = written {
                    bail!("{}: {e}", file.display());
                }
            }
            Err(e) => bail!("{}: {e}", file.display()),
        }
        Ok(Self(path.to_owned()))
    }

    fn file(&self, layer: usize) -> PathBuf {
        self.0.join(format!("layer-{layer}.safetensors"))
    }

    /// A layer's matrices, if it is done.
    pub fn layer(&self, layer: usize) -> Result<Option<Finished>> {
        let path = self.file(layer);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => bail!("{}: {e}", path.display()),
        };
        let read = || -> Result<Finished> {
            let file = QuantizedFile::from_bytes(&bytes)?;
            let names: Vec<String> = file.matrices().map(|(name, _)| name.to_owned()).collect();
            let mut finished = Finished::new();
            for name in names {
                let packed = Arc::new(file.whole_matrix(&name)?);
                finished.insert(name, packed);
            }
            Ok(finished)
        };
        match read() {
            Ok(finished) => Ok(Some(finished)),
            Err(e) => bail!(
                "{}: {e}: delete it, so that it is made anew",
                path.display()
            ),
        }
    }

    /// Writes a layer's matrices; the file appears there only when it is complete.
    pub fn write(&self, layer: usize, finished: &Finished) -> Result<()> {
        let path = self.file(layer);
        if path.exists() {
            return Ok(());
        }
        let saved = |(name, packed): (&String, &Arc<_>)| {
            (name.clone(), Saved::Packed(Arc::clone(packed), None))
        };
        save(
            &path,
            finished.iter().map(saved).collect(),
            Label::Quantized,
        )
    }
}

/// What has to be the same for layers to be of the same calibration; of the text, a hash of its embedded tokens, which are
/// the model's too.
fn describe(
    recipe: &Recipe,
    calibration: &Calibration,
    parts: &[Part],
) -> Result<Vec<(&'static str, Value)>> {
    let mut inputs = Fnv::new();
    parts.iter().try_for_each(|part| inputs.add(&part.x))?;
    Ok(vec![
        ("version", VERSION.into()),
        ("recipe", format!("{recipe:?}").into()),
        ("tokens", calibration.ids.len().into()),
        ("window", calibration.window.into()),
        ("options", format!("{:?}", calibration.options).into()),
        ("text", format!("{:016x}", inputs.0).into()),
    ])
}

/// The hash of Fowler, Noll and Vo (1a, 64 bits).
struct Fnv(u64);

impl Fnv {
    fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    fn add(&mut self, tensor: &Tensor) -> Result<()> {
        for value in tensor.flatten_all()?.to_vec1::<f32>()? {
            for byte in value.to_le_bytes() {
                self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
            }
        }
        Ok(())
    }
}
