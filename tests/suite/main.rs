//! The integration tests: one binary, a module per op and per model.

mod adopt;
mod allocations;
mod app;
mod balance;
mod bench_lengths;
mod bench_stats;
mod bitnet;
mod calibrate;
mod checkpoints;
mod dense;
mod drop_in;
mod drop_in_configs;
mod fallback;
mod families;
#[cfg(all(feature = "cuda", unix))]
mod faults;
mod flash_attention;
mod flash_attention_varlen;
mod flash_attn;
mod flash_decoding;
mod fuzz;
mod fuzz_replay;
mod fuzz_seeds;
mod generation;
mod generation_prompts;
mod generation_slots;
mod generation_steps;
mod gguf_file;
mod gguf_keys;
mod golden;
mod gpt_neox;
mod gptq;
mod inference_only;
mod kv_cache;
mod layer_norm;
mod layer_norm_linear;
mod linear;
mod llama;
mod llama_gguf;
mod logprobs;
mod models;
mod models_gguf;
mod models_gguf_dtypes;
mod nn;
mod packers;
mod paged_append;
mod paged_attention;
mod paged_prefill;
mod pages;
mod per_token;
mod pool;
mod pool_model;
mod properties;
mod quant_linear;
mod quant_schemes;
#[cfg(feature = "cuda")]
mod quant_schemes_cuda;
mod quantized_cache;
mod quantized_mistral;
mod qwen;
mod refusals;
#[cfg(feature = "cuda")]
mod replay;
mod residual_add;
mod rms_norm;
mod rms_norm_linear;
mod rope;
mod sample;
mod serving;
mod serving_buckets;
mod serving_draws;
mod serving_families;
mod serving_invariance;
#[cfg(feature = "cuda")]
mod serving_kernels;
#[cfg(target_os = "linux")]
mod serving_memory;
mod serving_order;
mod serving_prefixes;
mod serving_stops;
mod sizes;
mod smollm2;
mod smollm2_error;
mod soak;
mod stems;
mod structure;
mod subject;
mod support;
mod threads;
#[cfg(feature = "cuda")]
mod w8a8;

use ::common;

#[path = "../../examples/adopt/mod.rs"]
mod adopt_example;
