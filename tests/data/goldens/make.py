"""Writes the goldens of Mistral, Phi-3 and SmolLM3: tiny random models in Hugging Face format, and what
transformers computes with them in float64.

    pip install torch transformers safetensors
    python tests/data/goldens/make.py [NAME ..]
"""

import json
import pathlib
import sys

import torch
from safetensors.torch import save_file
from transformers import MistralConfig, Phi3Config, SmolLM3Config
from transformers import MistralForCausalLM, Phi3ForCausalLM, SmolLM3ForCausalLM

FOLDER = pathlib.Path(__file__).parent
GREEDY = 24
SHARED = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "attn_implementation": "eager",
}


def mistral_window():
    """A window shorter than the prompt, and heads wider than the stream divided by them."""
    return MistralForCausalLM(
        MistralConfig(
            **SHARED, num_hidden_layers=2, head_dim=24, sliding_window=7, tie_word_embeddings=False
        )
    )


def phi3_partial():
    """Three quarters of each head rotated, a window."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
    return Phi3ForCausalLM(
        Phi3Config(**SHARED, num_hidden_layers=2, rope_parameters=rope, sliding_window=9)
    )


def phi3_long():
    """Long rotary factors behind 32 positions, which the greedy tokens pass."""
    pairs = 6
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0 + 0.05 * i for i in range(pairs)],
        "long_factor": [1.5 + 0.7 * i for i in range(pairs)],
        "original_max_position_embeddings": 32,
    }
    config = Phi3Config(
        **SHARED,
        num_hidden_layers=2,
        rope_parameters=rope,
        original_max_position_embeddings=32,
        tie_word_embeddings=True,
    )
    return Phi3ForCausalLM(config)


def smollm3_nope():
    """The fourth layer without rotary, as GGUF files take for granted."""
    return SmolLM3ForCausalLM(SmolLM3Config(**SHARED, num_hidden_layers=4, tie_word_embeddings=True))


# The tokens of the prompt, and of a second one where what is behind them differs.
MODELS = {
    "mistral_window": (mistral_window, 17, None),
    "phi3_partial": (phi3_partial, 17, None),
    "phi3_long": (phi3_long, 17, 45),
    "smollm3_nope": (smollm3_nope, 13, None),
}


def draw(model, generator):
    """Weights wide enough that every part matters to the logits."""
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
        if weight.dim() == 1:
            weight.data = (1 + 0.3 * noise) if "norm" in name else 0.3 * noise
        elif "embed" in name:
            weight.data = noise
        else:
            weight.data = 1.5 * noise / weight.shape[1] ** 0.5


def outputs(model, ids):
    with torch.no_grad():
        return model(ids, output_hidden_states=True, use_cache=False)


def greedy(model, ids):
    """The likeliest tokens by a cache that is read as it was filled, and by how much they are ahead."""
    tokens, margins, cache, chunk = [], [], None, ids
    with torch.no_grad():
        for _ in range(GREEDY):
            out = model(chunk, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            best = out.logits[:, -1].topk(2)
            margins.append(best.values[:, 0] - best.values[:, 1])
            chunk = best.indices[:, :1]
            tokens.append(chunk[:, 0])
    return torch.stack(tokens, 1), torch.stack(margins, 1)


def make(name):
    build, tokens, longer = MODELS[name]
    generator = torch.Generator().manual_seed(sum(name.encode()))
    model = build().float().eval()
    draw(model, generator)
    model.tie_weights()
    folder = FOLDER / name
    folder.mkdir(exist_ok=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    model = model.double()
    vocab = model.config.vocab_size
    ids = torch.randint(2, vocab, (2, tokens), generator=generator)
    out = outputs(model, ids)
    next_tokens, margins = greedy(model, ids)
    golden = {
        "input_ids": ids,
        "logits": out.logits,
        "hidden_states": torch.stack(out.hidden_states),
        "greedy": next_tokens,
        "greedy_margin": margins,
    }
    if longer:
        ids = torch.randint(2, vocab, (1, longer), generator=generator)
        golden["longer_ids"] = ids
        golden["longer_logits"] = outputs(model, ids).logits
    golden = {k: (v if v.dtype == torch.int64 else v.float()).contiguous() for k, v in golden.items()}
    save_file(golden, folder / "golden.safetensors")
    config = json.loads((folder / "config.json").read_text())
    print(name, config["rope_parameters"], "margins from", margins.min().item())


if __name__ == "__main__":
    for wanted in sys.argv[1:] or MODELS:
        make(wanted)
