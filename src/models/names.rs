//! What the tensors of a model are called.

/// Tensors by their stems: `.weight` and `.bias` follow.
#[derive(Debug)]
pub struct Names {
    pub embedding: &'static str,
    /// The part before a layer's number; the names below come after it.
    pub layer: &'static str,
    pub attention_norm: &'static str,
    pub qkv: Qkv,
    /// Norms of queries and keys.
    pub head_norms: [&'static str; 2],
    /// Norms before output and down.
    pub sub_norms: [&'static str; 2],
    pub output: &'static str,
    pub mlp_norm: &'static str,
    /// Gate and up, or up alone.
    pub up: &'static [&'static str],
    pub down: &'static str,
    pub norm: &'static str,
    pub head: &'static str,
}

impl Names {
    /// The names of a model's matrices, head and embedding before the layers.
    pub fn matrices(&self, layers: usize) -> Vec<String> {
        let qkv = match &self.qkv {
            Qkv::Three(parts) => &parts[..],
            Qkv::Joint(name) | Qkv::PerHead(name) => std::slice::from_ref(name),
        };
        let parts: Vec<_> = [qkv, &[self.output], self.up, &[self.down]].concat();
        let of_layers = (0..layers).flat_map(|layer| {
            let within = |part: &&str| format!("{}.{layer}.{part}.weight", self.layer);
            parts.iter().map(within).collect::<Vec<_>>()
        });
        let ends = [self.embedding, self.head].map(|name| format!("{name}.weight"));
        ends.into_iter().chain(of_layers).collect()
    }
}

/// How queries, keys and values are stored.
#[derive(Debug)]
pub enum Qkv {
    /// A matrix each.
    Three([&'static str; 3]),
    /// One matrix: queries, keys, values.
    Joint(&'static str),
    /// One matrix: each head's queries, keys and values in turn.
    PerHead(&'static str),
}

/// Hugging Face's names for Llama and its relatives.
pub const LLAMA: Names = Names {
    embedding: "model.embed_tokens",
    layer: "model.layers",
    attention_norm: "input_layernorm",
    qkv: Qkv::Three(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
    head_norms: ["self_attn.q_norm", "self_attn.k_norm"],
    sub_norms: ["self_attn.attn_sub_norm", "mlp.ffn_sub_norm"],
    output: "self_attn.o_proj",
    mlp_norm: "post_attention_layernorm",
    up: &["mlp.gate_proj", "mlp.up_proj"],
    down: "mlp.down_proj",
    norm: "model.norm",
    head: "lm_head",
};

/// GGUF's names for the same.
pub const GGUF: Names = Names {
    embedding: "token_embd",
    layer: "blk",
    attention_norm: "attn_norm",
    qkv: Qkv::Three(["attn_q", "attn_k", "attn_v"]),
    head_norms: ["attn_q_norm", "attn_k_norm"],
    sub_norms: ["attn_sub_norm", "ffn_sub_norm"],
    output: "attn_output",
    mlp_norm: "ffn_norm",
    up: &["ffn_gate", "ffn_up"],
    down: "ffn_down",
    norm: "output_norm",
    head: "output",
};
