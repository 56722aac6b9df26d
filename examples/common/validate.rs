//! Quick checks that a file is what its name says and is all there. They read headers only; the
//! loaders check the rest.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::path::{Component, Path};

use anyhow::{Context, Result, bail, ensure};
use candle_fused::quant::QuantizedFile;
use serde_json::Value;

/// Fails unless `file` begins as a GGUF file does.
pub fn gguf(file: &Path) -> Result<()> {
    let shown = file.display();
    let mut magic = [0u8; 9];
    let mut reader = File::open(file).with_context(|| format!("cannot open {shown}"))?;
    let read =
        read_up_to(&mut reader, &mut magic).with_context(|| format!("cannot read {shown}"))?;
    match &magic[..read] {
        m if m.starts_with(b"GGUF") => Ok(()),
        [] => bail!("{shown} is empty; fetch it again"),
        [b'v', b'e', b'r', b's', b'i', b'o', b'n', ..] => {
            bail!(
                "{shown} is a Git LFS pointer and not the model itself; fetch it with git lfs pull"
            )
        }
        [_, _, _, _, _, _, _, _, b'{'] => {
            bail!("{shown} is a safetensors file; pass the folder it is in")
        }
        _ => bail!("{shown} is no GGUF file; --model takes a GGUF file, a folder or a hub id"),
    }
}

fn read_up_to(reader: &mut impl Read, buffer: &mut [u8]) -> std::io::Result<usize> {
    let mut read = 0;
    while read < buffer.len() {
        match reader.read(&mut buffer[read..])? {
            0 => break,
            n => read += n,
        }
    }
    Ok(read)
}

/// Fails unless the tensors that the header of `file` lists fill it exactly.
pub fn safetensors(file: &Path) -> Result<()> {
    let shown = file.display();
    let mut reader = File::open(file).with_context(|| format!("cannot open {shown}"))?;
    let size = reader
        .metadata()
        .with_context(|| format!("cannot read {shown}"))?
        .len();
    let mut length = [0u8; 8];
    reader
        .read_exact(&mut length)
        .with_context(|| format!("{shown} is cut short; fetch it again"))?;
    let header_len = u64::from_le_bytes(length);
    // The format's own bound on headers.
    ensure!(
        header_len <= 100_000_000 && header_len <= size - 8,
        "{shown} is damaged or cut short (its header does not fit); fetch it again"
    );
    let mut header_bytes = vec![0u8; header_len as usize];
    reader
        .read_exact(&mut header_bytes)
        .with_context(|| format!("cannot read {shown}"))?;
    let header: Value = serde_json::from_slice(&header_bytes)
        .with_context(|| format!("{shown} is damaged (its header is no JSON); fetch it again"))?;
    let quantized = QuantizedFile::is_quantized(&header_bytes);
    // A matrix with a scale is quantized, in a way that the configuration tells.
    let scaled = |name: &str| {
        ["_scale", "_scale_inv", ".absmax"]
            .iter()
            .any(|scale| header.get(format!("{name}{scale}")).is_some())
    };
    for (name, tensor) in header.as_object().into_iter().flatten() {
        let dtype = tensor["dtype"].as_str().unwrap_or_default();
        ensure!(
            quantized
                || !name.ends_with(".weight")
                || scaled(name)
                || ["F32", "F16", "BF16", "F64"].contains(&dtype),
            "{shown}: tensor {name} is {dtype}, expected F32, F16 or BF16; take another model"
        );
    }
    let data = header
        .as_object()
        .with_context(|| {
            format!("{shown} is damaged (its header is no JSON object); fetch it again")
        })?
        .iter()
        .filter(|(name, _)| *name != "__metadata__")
        .filter_map(|(_, tensor)| tensor["data_offsets"][1].as_u64())
        .max()
        .unwrap_or(0);
    let need = data.saturating_add(8 + header_len);
    ensure!(
        need == size,
        "{shown} has {size} bytes where its header asks for {need}; fetch it again"
    );
    Ok(())
}

/// Whether the header of this safetensors file says that it holds a quantized model.
pub fn is_quantized(file: &Path) -> Result<bool> {
    let shown = file.display();
    let mut reader = File::open(file).with_context(|| format!("cannot open {shown}"))?;
    let mut length = [0u8; 8];
    let mut header = Vec::new();
    reader
        .read_exact(&mut length)
        .and_then(|()| {
            reader
                .take(u64::from_le_bytes(length))
                .read_to_end(&mut header)
        })
        .with_context(|| format!("cannot read {shown}"))?;
    Ok(QuantizedFile::is_quantized(&header))
}

/// Fails unless `file` holds JSON.
pub fn json(file: &Path) -> Result<Value> {
    let text = std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    serde_json::from_slice(&text)
        .with_context(|| format!("{} is not valid JSON; fetch it again", file.display()))
}

/// The files that an index of sharded weights names, each once, in order.
pub fn shards(index: &Path) -> Result<Vec<String>> {
    let shown = index.display();
    let names: BTreeSet<String> = json(index)?["weight_map"]
        .as_object()
        .with_context(|| format!("{shown} has no weight_map; fetch it again"))?
        .values()
        .map(|name| {
            name.as_str()
                .map(str::to_owned)
                .with_context(|| format!("{shown} is damaged; fetch it again"))
        })
        .collect::<Result<_>>()?;
    for name in &names {
        let inside = Path::new(name)
            .components()
            .all(|part| matches!(part, Component::Normal(_)));
        ensure!(
            inside && !name.is_empty(),
            "{shown} names a file outside its folder ({name}); do not use this model"
        );
    }
    ensure!(!names.is_empty(), "{shown} names no files; fetch it again");
    Ok(names.into_iter().collect())
}
