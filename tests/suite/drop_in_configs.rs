//! Every field of candle-transformers' configurations, by name and type: one that is missing, and one that it does not
//! have, does not compile. So callers' struct literals, patterns and matches compile with either.

use candle_fused::models::smol::{quantized_smollm3, smollm3};
use candle_fused::models::{llama, mistral, phi3, quantized_mistral, qwen2, qwen3};
use candle_transformers::models as stock;
use serde::de::DeserializeOwned;

/// Takes one of candle's to pieces and makes one of ours of them, with `more` fields.
macro_rules! same_fields {
    ($stock:path, $ours:path, [$($field:ident $(: $convert:expr)?),+ $(,)?] $(, $more:ident)*) => {
        let _: fn($stock) -> $ours = |config| {
            let $stock { $($field),+ } = config;
            $($(let $field = $field.map($convert);)?)+
            $ours { $($field,)+ $($more: Default::default(),)* }
        };
    };
}

fn config<T: Clone + std::fmt::Debug + DeserializeOwned>() {}
fn compared<T: Clone + std::fmt::Debug + PartialEq + DeserializeOwned>() {}

fn eos(eos: stock::llama::LlamaEosToks) -> llama::LlamaEosToks {
    match eos {
        stock::llama::LlamaEosToks::Single(id) => llama::LlamaEosToks::Single(id),
        stock::llama::LlamaEosToks::Multiple(ids) => llama::LlamaEosToks::Multiple(ids),
    }
}

/// A caller's matches, which have no arm for variants that candle-transformers lacks.
#[test]
fn enums_have_no_variants_more() {
    let _: fn(llama::LlamaEosToks) -> stock::llama::LlamaEosToks = |eos| match eos {
        llama::LlamaEosToks::Single(id) => stock::llama::LlamaEosToks::Single(id),
        llama::LlamaEosToks::Multiple(ids) => stock::llama::LlamaEosToks::Multiple(ids),
    };
    let _: fn(llama::Llama3RopeType) -> stock::llama::Llama3RopeType = |kind| match kind {
        llama::Llama3RopeType::Llama3 => stock::llama::Llama3RopeType::Llama3,
        llama::Llama3RopeType::Default => stock::llama::Llama3RopeType::Default,
    };
    let _: fn(phi3::RopeScalingType) -> stock::phi3::RopeScalingType = |kind| match kind {
        phi3::RopeScalingType::LongRope => stock::phi3::RopeScalingType::LongRope,
    };
}

fn scaling(scaling: stock::llama::Llama3RopeConfig) -> llama::Llama3RopeConfig {
    let stock::llama::Llama3RopeConfig {
        factor,
        low_freq_factor,
        high_freq_factor,
        original_max_position_embeddings,
        rope_type,
    } = scaling;
    llama::Llama3RopeConfig {
        factor,
        low_freq_factor,
        high_freq_factor,
        original_max_position_embeddings,
        rope_type: match rope_type {
            stock::llama::Llama3RopeType::Llama3 => llama::Llama3RopeType::Llama3,
            stock::llama::Llama3RopeType::Default => llama::Llama3RopeType::Default,
        },
    }
}

#[test]
fn llamas() {
    same_fields!(
        stock::llama::LlamaConfig,
        llama::LlamaConfig,
        [
            hidden_size,
            intermediate_size,
            vocab_size,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads,
            rms_norm_eps,
            rope_theta,
            bos_token_id,
            eos_token_id: eos,
            rope_scaling: scaling,
            max_position_embeddings,
            tie_word_embeddings,
        ]
    );
    same_fields!(
        stock::llama::Config,
        llama::Config,
        [
            hidden_size,
            intermediate_size,
            vocab_size,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads,
            use_flash_attn,
            rms_norm_eps,
            rope_theta,
            bos_token_id,
            eos_token_id: eos,
            rope_scaling: scaling,
            max_position_embeddings,
            tie_word_embeddings,
        ]
    );
    config::<llama::LlamaConfig>();
    config::<llama::LlamaEosToks>();
    let _ = (
        llama::Llama3RopeConfig::default(),
        llama::Llama3RopeType::default(),
    );
    config::<llama::Llama3RopeConfig>();
    config::<llama::Llama3RopeType>();
}

#[test]
fn mistrals_and_qwens() {
    same_fields!(
        stock::mistral::Config,
        mistral::Config,
        [
            vocab_size,
            hidden_size,
            intermediate_size,
            num_hidden_layers,
            num_attention_heads,
            head_dim,
            num_key_value_heads,
            hidden_act,
            max_position_embeddings,
            rms_norm_eps,
            rope_theta,
            sliding_window,
            use_flash_attn,
        ]
    );
    let _: fn(mistral::Config) -> quantized_mistral::Config = |config| config;
    same_fields!(
        stock::qwen2::Config,
        qwen2::Config,
        [
            vocab_size,
            hidden_size,
            intermediate_size,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads,
            max_position_embeddings,
            sliding_window,
            max_window_layers,
            tie_word_embeddings,
            rope_theta,
            rms_norm_eps,
            use_sliding_window,
            hidden_act,
        ]
    );
    same_fields!(
        stock::qwen3::Config,
        qwen3::Config,
        [
            vocab_size,
            hidden_size,
            intermediate_size,
            num_hidden_layers,
            num_attention_heads,
            head_dim,
            attention_bias,
            num_key_value_heads,
            max_position_embeddings,
            sliding_window,
            max_window_layers,
            tie_word_embeddings,
            rope_theta,
            rms_norm_eps,
            use_sliding_window,
            hidden_act,
        ]
    );
    compared::<mistral::Config>();
    compared::<qwen2::Config>();
    compared::<qwen3::Config>();
}

fn factors(scaling: stock::phi3::RopeScaling) -> phi3::RopeScaling {
    let stock::phi3::RopeScaling {
        short_factor,
        long_factor,
        type_: stock::phi3::RopeScalingType::LongRope,
    } = scaling;
    phi3::RopeScaling {
        short_factor,
        long_factor,
        type_: phi3::RopeScalingType::LongRope,
    }
}

/// Phi-3's has one field more, the window that candle-transformers ignores: a literal has to name it.
#[test]
fn phis_and_smollms() {
    same_fields!(
        stock::phi3::Config,
        phi3::Config,
        [
            vocab_size,
            hidden_act,
            hidden_size,
            intermediate_size,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads,
            rms_norm_eps,
            rope_theta,
            bos_token_id,
            eos_token_id,
            rope_scaling: factors,
            max_position_embeddings,
            original_max_position_embeddings,
            partial_rotary_factor,
            tie_word_embeddings,
        ],
        sliding_window
    );
    same_fields!(
        stock::smol::smollm3::Config,
        smollm3::Config,
        [
            vocab_size,
            hidden_size,
            intermediate_size,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads,
            max_position_embeddings,
            tie_word_embeddings,
            rope_theta,
            rms_norm_eps,
            hidden_act,
            attention_bias,
            attention_dropout,
            mlp_bias,
            sliding_window,
            use_sliding_window,
            rope_scaling,
            bos_token_id,
            eos_token_id,
            pad_token_id,
            max_window_layers,
            no_rope_layers,
            no_rope_layer_interval,
        ]
    );
    same_fields!(
        stock::smol::quantized_smollm3::QuantizedConfig,
        quantized_smollm3::QuantizedConfig,
        [
            vocab_size,
            hidden_size,
            intermediate_size,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads,
            max_position_embeddings,
            rope_theta,
            rms_norm_eps,
            rope_dimension_count,
            no_rope_layer_interval,
        ]
    );
    config::<phi3::Config>();
    config::<phi3::RopeScaling>();
    config::<phi3::RopeScalingType>();
    compared::<smollm3::Config>();
}
