//! `quantization_config` of a `config.json`.

use super::bitnet::Layer;
use super::fp8::Block;
use crate::quant::NVFP4_GROUP;
use candle_core::{Result, bail};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Display;

/// How the quantized matrices of a checkpoint are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Gptq {
        /// Whether zero points are stored as they are; else less one.
        zeros_as_they_are: bool,
    },
    Awq,
    CompressedTensors {
        /// What matrices of a byte for each value hold.
        bytes: Bytes,
        /// Whether all matrices of packed codes are NVFP4.
        nvfp4: bool,
        /// Whether activations are not quantized that are to be NVFP4.
        ignores_nvfp4_inputs: bool,
    },
    Fp8(Block),
    BitNet(Layer),
    Nf4,
}

/// What compressed-tensors calls NVFP4.
const NVFP4: &str = "nvfp4-pack-quantized";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bytes {
    Int,
    Fp8(Block),
}

impl Bytes {
    /// What both are, if one says that: scales of rows need no blocks.
    fn with(self, other: Self) -> Option<Self> {
        match (self, other) {
            (Bytes::Fp8(one), Bytes::Fp8(None)) => Some(Bytes::Fp8(one)),
            (Bytes::Fp8(None), Bytes::Fp8(other)) => Some(Bytes::Fp8(other)),
            _ => (self == other).then_some(self),
        }
    }
}

/// `quantization_config` as written: the fields that say how tensors are read, or that numbers change
/// in a way that nothing here does.
#[derive(Deserialize)]
struct Raw {
    quant_method: Option<String>,
    bits: Option<u64>,
    group_size: Option<i64>,
    checkpoint_format: Option<String>,
    pack_dtype: Option<String>,
    is_marlin_format: Option<bool>,
    version: Option<String>,
    format: Option<String>,
    fmt: Option<String>,
    weight_block_size: Block,
    linear_class: Option<String>,
    quantization_mode: Option<String>,
    use_rms_norm: Option<bool>,
    load_in_4bit: Option<bool>,
    bnb_4bit_quant_type: Option<String>,
    bnb_4bit_quant_storage: Option<String>,
    modules_to_not_convert: Option<Vec<String>>,
    #[serde(default)]
    config_groups: BTreeMap<String, Group>,
    kv_cache_scheme: Option<Value>,
    sparsity_config: Option<Sparsity>,
    transform_config: Option<Value>,
}

/// Of compressed-tensors: how some of the layers are quantized.
#[derive(Deserialize)]
struct Group {
    weights: Option<Arguments>,
    input_activations: Option<Arguments>,
    output_activations: Option<Value>,
    format: Option<String>,
}

/// Of compressed-tensors: how one tensor of a layer is quantized.
#[derive(Deserialize)]
struct Arguments {
    num_bits: Option<u64>,
    r#type: Option<String>,
    strategy: Option<String>,
    group_size: Option<i64>,
    block_structure: Block,
}

#[derive(Deserialize)]
struct Sparsity {
    format: Option<String>,
}

impl Format {
    /// Reads the text of a `config.json`; none if the model is not quantized.
    ///
    /// # Errors
    /// If it is no JSON object, or a field asks for what cannot be had exactly: by its name, its value
    /// and what is taken.
    pub fn of_config(config: &str) -> Result<Option<Self>> {
        #[derive(Deserialize)]
        struct Config {
            quantization_config: Option<Value>,
        }
        let config: Config = match serde_json::from_str(config) {
            Ok(config) => config,
            Err(e) => bail!("config: {e}"),
        };
        let Some(value) = config.quantization_config else {
            return Ok(None);
        };
        match serde_json::from_value::<Raw>(value) {
            Ok(raw) => raw.format().map(Some),
            Err(e) => bail!("config: quantization_config: {e}"),
        }
    }
}

/// What `quant_method` may be.
const METHODS: &str = "gptq, awq, compressed-tensors, fp8, bitnet or bitsandbytes";

/// The error of a field whose value is not taken.
fn refuse<T>(field: impl Display, value: impl Display, expected: &str) -> Result<T> {
    bail!("config: quantization_config: {field} is {value}, expected {expected}")
}

/// That a text, where it is given, is one of those that are taken, in whichever case.
fn one_of(field: impl Display, value: Option<&str>, taken: &[&str]) -> Result<()> {
    match value {
        Some(value) if !taken.iter().any(|one| one.eq_ignore_ascii_case(value)) => {
            refuse(field, format_args!("`{value}`"), &taken.join(" or "))
        }
        _ => Ok(()),
    }
}

/// Whether a text that [`one_of`] takes is this one.
fn is(given: Option<&str>, name: &str) -> bool {
    given.is_some_and(|given| given.eq_ignore_ascii_case(name))
}

/// That weights of these bits in these groups have a format here.
fn check_integers(prefix: &str, bits: Option<u64>, group: Option<i64>) -> Result<()> {
    if let Some(bits) = bits.filter(|bits| ![4, 8].contains(bits)) {
        return refuse(format_args!("{prefix}bits"), bits, "4 or 8");
    }
    match group {
        Some(group) if group != -1 && (group < 32 || group % 32 != 0) => refuse(
            format_args!("{prefix}group_size"),
            group,
            "-1 or a multiple of 32",
        ),
        _ => Ok(()),
    }
}

/// Whether something is said at all: neither null nor empty.
fn is_said(value: Option<&Value>) -> bool {
    match value {
        None | Some(Value::Null) => false,
        Some(Value::Object(fields)) => !fields.is_empty(),
        Some(_) => true,
    }
}

impl Raw {
    fn format(&self) -> Result<Format> {
        match self.quant_method.as_deref() {
            Some("gptq") => self.gptq(),
            Some("awq") => self.awq(),
            Some("compressed-tensors" | "compressed_tensors") => self.compressed(),
            Some("fp8") => self.fp8(),
            Some("bitnet") => self.bitnet(),
            Some("bitsandbytes") => self.bitsandbytes(),
            Some(other) => refuse("quant_method", format_args!("`{other}`"), METHODS),
            None => refuse("quant_method", "missing", METHODS),
        }
    }

    fn gptq(&self) -> Result<Format> {
        check_integers("", self.bits, self.group_size)?;
        if self.is_marlin_format == Some(true) {
            return refuse("is_marlin_format", true, "false");
        }
        one_of("pack_dtype", self.pack_dtype.as_deref(), &["int32"])?;
        // GPTQModel writes the same under both names.
        let format = self.checkpoint_format.as_deref();
        let known = ["gptq", "gptq_v2"];
        one_of("checkpoint_format", format, &known)?;
        one_of("format", self.format.as_deref(), &known)?;
        let format = format.or(self.format.as_deref());
        Ok(Format::Gptq {
            zeros_as_they_are: is(format, "gptq_v2"),
        })
    }

    fn awq(&self) -> Result<Format> {
        check_integers("", self.bits, self.group_size)?;
        if let Some(bits) = self.bits.filter(|bits| *bits != 4) {
            return refuse("bits", bits, "4");
        }
        one_of("version", self.version.as_deref(), &["gemm"])?;
        one_of("format", self.format.as_deref(), &["gemm"])?;
        Ok(Format::Awq)
    }

    fn fp8(&self) -> Result<Format> {
        one_of("fmt", self.fmt.as_deref(), &["e4m3"])?;
        check_block("weight_block_size", self.weight_block_size)?;
        Ok(Format::Fp8(self.weight_block_size))
    }

    fn bitsandbytes(&self) -> Result<Format> {
        if self.load_in_4bit != Some(true) {
            let given = self.load_in_4bit.map_or("missing", |_| "false");
            return refuse("load_in_4bit", given, "true");
        }
        // What nothing is said of is FP4.
        let kind = self.bnb_4bit_quant_type.as_deref().unwrap_or("fp4");
        one_of("bnb_4bit_quant_type", Some(kind), &["nf4"])?;
        let storage = self.bnb_4bit_quant_storage.as_deref();
        one_of("bnb_4bit_quant_storage", storage, &["uint8"])?;
        Ok(Format::Nf4)
    }

    fn bitnet(&self) -> Result<Format> {
        let (class, mode) = (
            self.linear_class.as_deref(),
            self.quantization_mode.as_deref(),
        );
        one_of("linear_class", class, &["bitlinear", "autobitlinear"])?;
        one_of("quantization_mode", mode, &["offline", "online"])?;
        if self.use_rms_norm == Some(true) {
            return refuse("use_rms_norm", true, "false");
        }
        let layer = match (is(class, "autobitlinear"), is(mode, "online")) {
            (false, _) => Layer::Divided,
            (true, false) => Layer::Multiplied,
            (true, true) => Layer::Online,
        };
        // Nothing else tells numbers that become ternary from others.
        match &self.modules_to_not_convert {
            Some(kept) if layer == Layer::Online && *kept != ["lm_head"] => refuse(
                "modules_to_not_convert",
                format_args!("{kept:?}"),
                "lm_head alone with quantization_mode online",
            ),
            _ => Ok(Format::BitNet(layer)),
        }
    }

    fn compressed(&self) -> Result<Format> {
        let packings = ["pack-quantized", "int-quantized", "float-quantized", NVFP4];
        let of_all = [&packings[..], &["mixed-precision"]].concat();
        one_of("format", self.format.as_deref(), &of_all)?;
        if let Some(sparsity) = &self.sparsity_config {
            one_of(
                "sparsity_config.format",
                sparsity.format.as_deref(),
                &["dense"],
            )?;
        }
        for (field, value) in [
            ("kv_cache_scheme", &self.kv_cache_scheme),
            ("transform_config", &self.transform_config),
        ] {
            if is_said(value.as_ref()) {
                return refuse(field, "there", "none");
            }
        }
        for (name, group) in &self.config_groups {
            let format = format!("config_groups.{name}.format");
            one_of(format, group.format.as_deref(), &packings)?;
            group.check(name)?;
        }
        let mut bytes = self.config_groups.values().filter_map(Group::bytes);
        let first = bytes.next().unwrap_or(Bytes::Int);
        match bytes.try_fold(first, Bytes::with) {
            Some(bytes) => Ok(Format::CompressedTensors {
                bytes,
                nvfp4: self.packs_nvfp4_alone(),
                ignores_nvfp4_inputs: self.config_groups.values().any(Group::has_small_inputs),
            }),
            None => refuse("config_groups", "of several kinds of bytes", "one for all"),
        }
    }

    /// Of compressed-tensors, whose groups may say nothing of their format.
    fn packs_nvfp4_alone(&self) -> bool {
        let of = |group: &Group| group.format.clone().or(self.format.clone());
        let mut formats: Vec<_> = self.config_groups.values().map(of).collect();
        if formats.is_empty() {
            formats.push(self.format.clone());
        }
        let has = |name| formats.iter().any(|format| is(format.as_deref(), name));
        has(NVFP4) && !has("pack-quantized") && !has("mixed-precision")
    }
}

impl Group {
    /// What its matrices hold, if they have a byte for each value.
    fn bytes(&self) -> Option<Bytes> {
        let mut packings = ["pack-quantized", NVFP4].into_iter();
        let packed = packings.any(|name| is(self.format.as_deref(), name));
        let weights = self.weights.as_ref().filter(|_| !packed)?;
        match weights.is_float() {
            true if weights.num_bits == Some(4) => None,
            true => Some(Bytes::Fp8(weights.block_structure)),
            false if weights.num_bits == Some(8) => Some(Bytes::Int),
            false => None,
        }
    }

    /// Whether its activations are floats of 4 bits.
    fn has_small_inputs(&self) -> bool {
        let inputs = self.input_activations.as_ref();
        inputs.is_some_and(|inputs| inputs.is_float() && inputs.num_bits == Some(4))
    }

    fn check(&self, name: &str) -> Result<()> {
        let within = format!("config_groups.{name}");
        if let Some(weights) = self.weights.as_ref().filter(|w| w.is_float()) {
            return weights.check_float(&format!("{within}.weights"));
        }
        if let Some(weights) = &self.weights {
            let prefix = format!("{within}.weights");
            one_of(
                format_args!("{prefix}.type"),
                weights.r#type.as_deref(),
                &["int"],
            )?;
            check_integers(&format!("{prefix}.num_"), weights.num_bits, None)?;
            check_integers(&format!("{prefix}."), None, weights.group_size)?;
            one_of(
                format_args!("{prefix}.strategy"),
                weights.strategy.as_deref(),
                &["tensor", "channel", "group"],
            )?;
        }
        if let Some(inputs) = &self.input_activations {
            let prefix = format!("{within}.input_activations");
            one_of(
                format_args!("{prefix}.type"),
                inputs.r#type.as_deref(),
                &["int"],
            )?;
            if let Some(bits) = inputs.num_bits.filter(|bits| *bits != 8) {
                return refuse(format_args!("{prefix}.num_bits"), bits, "8");
            }
        }
        match is_said(self.output_activations.as_ref()) {
            true => refuse(format_args!("{within}.output_activations"), "there", "none"),
            false => Ok(()),
        }
    }
}

impl Arguments {
    fn is_float(&self) -> bool {
        is(self.r#type.as_deref(), "float")
    }

    /// FP8 and NVFP4, whose activations are not quantized here, whatever is said of them.
    fn check_float(&self, prefix: &str) -> Result<()> {
        if self.num_bits == Some(4) {
            return self.check_nvfp4(prefix);
        }
        if let Some(bits) = self.num_bits.filter(|bits| *bits != 8) {
            return refuse(
                format_args!("{prefix}.num_bits"),
                bits,
                "4 or 8 with type float",
            );
        }
        one_of(
            format_args!("{prefix}.strategy"),
            self.strategy.as_deref(),
            &["tensor", "channel", "block"],
        )?;
        check_block(
            format_args!("{prefix}.block_structure"),
            self.block_structure,
        )
    }

    fn check_nvfp4(&self, prefix: &str) -> Result<()> {
        let strategy = self.strategy.as_deref().unwrap_or("missing");
        one_of(
            format_args!("{prefix}.strategy"),
            Some(strategy),
            &["tensor_group"],
        )?;
        let group = self.group_size.unwrap_or(NVFP4_GROUP as i64);
        match group == NVFP4_GROUP as i64 {
            true => Ok(()),
            false => refuse(
                format_args!("{prefix}.group_size"),
                group,
                "16 with floats of 4 bits",
            ),
        }
    }
}

fn check_block(field: impl Display, block: Block) -> Result<()> {
    match block {
        Some([height, width]) if height == 0 || width == 0 => {
            refuse(field, format_args!("[{height}, {width}]"), "at least 1")
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
