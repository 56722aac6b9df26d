"""Writes tiny random models in the quantized formats of the hub, packed by the formats' own projects, and what
transformers computes in float64 with the weights that those projects read back.

    pip install torch transformers safetensors compressed-tensors bitsandbytes numpy
    pip download --no-deps auto-gptq==0.7.1 autoawq==0.2.9    # unpacked beside each other, in FOLDER
    python tests/data/checkpoints/make.py FOLDER [NAME ..]

AutoGPTQ and AutoAWQ are read, not installed: of each the one file that packs.
"""

import json
import pathlib
import sys

import torch

from packers import awq, bitnet, compressed, fp8, fp8_channel, gptq, nf4, nvfp4, packers
from safetensors.torch import save_file
from transformers import BitNetConfig, BitNetForCausalLM, BitNetQuantConfig
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.integrations import bitnet as bitnet_layers

FOLDER = pathlib.Path(__file__).parent
SHARED = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "attn_implementation": "eager",
}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32}),
    "bitnet": (BitNetForCausalLM, BitNetConfig, {"intermediate_size": 192}),
}


def with_bitnet_layers(model, tensors, option):
    """The model in float64 with transformers' own layers in place of the linear ones, which round their inputs."""
    weights = {path: layer.weight.data for path, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}
    option = BitNetQuantConfig(**{key: value for key, value in option.items() if key != "quant_method"})
    model = bitnet_layers.replace_with_bitnet_linear(model.double(), ["lm_head"], option)
    for path, layer in model.named_modules():
        if not isinstance(layer, (bitnet_layers.BitLinear, bitnet_layers.AutoBitLinear)):
            continue
        packed = tensors[f"{path}.weight"]
        if isinstance(layer, bitnet_layers.BitLinear):
            layer.dtype, layer.weight = torch.float64, packed
        elif layer.online_quant:
            layer.weight = torch.nn.Parameter(packed.double(), requires_grad=False)
        else:
            unpacked = bitnet_layers.unpack_weights(packed, torch.float64)
            layer.weight = torch.nn.Parameter(unpacked, requires_grad=False)
        if f"{path}.weight_scale" in tensors:
            layer.weight_scale = tensors[f"{path}.weight_scale"].double()
        # One-hot inputs are not changed by rounding, so that the product reads the weight back.
        read = layer(torch.eye(layer.in_features, dtype=torch.float64)).t()
        assert (read - weights[path]).abs().max() <= 1e-6 * weights[path].abs().max()
    return model


def least_margin(model, ids):
    """How far an input is at least from the middle of two steps, in steps: f32 rounds it as float64 does if that is
    more than f32's error."""
    margins = []

    def look(layer, inputs):
        x = inputs[0]
        steps = x * 127 / x.abs().amax(-1, keepdim=True)
        margins.append(((steps - steps.floor()) - 0.5).abs().min())

    layers = [m for m in model.modules() if isinstance(m, (bitnet_layers.BitLinear, bitnet_layers.AutoBitLinear))]
    hooks = [layer.register_forward_pre_hook(look) for layer in layers]
    with torch.no_grad():
        model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return float(min(margins))


def gptq_config(bits, group, **more):
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": True, **more}


def compressed_config(format, weights, inputs=None):
    group = {"targets": ["Linear"], "weights": {"type": "int", "dynamic": False, **weights}}
    if inputs:
        group["input_activations"] = inputs
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def nf4_config(dtype, double):
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_compute_dtype": dtype,
        "bnb_4bit_use_double_quant": double,
    }


GROUPED = {"num_bits": 4, "strategy": "group"}
FLOATS4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
# Family, method, quantization_config, what is special.
MODELS = {
    "llama_gptq_g128": ("llama", gptq, gptq_config(4, 128), {}),
    "llama_gptq_act_order": ("llama", gptq, gptq_config(4, 32, desc_act=True, sym=False), {"shards": 2}),
    "llama_gptq_own_orders": ("llama", gptq, gptq_config(4, 64, desc_act=True), {"own_orders": True}),
    "qwen2_gptq_v2": ("qwen2", gptq, gptq_config(4, 64, sym=False, checkpoint_format="gptq_v2"), {}),
    "llama_gptq_int8_g32": ("llama", gptq, gptq_config(8, 32), {}),
    "llama_gptq_int8": ("llama", gptq, gptq_config(8, -1), {}),
    "llama_awq_g64": (
        "llama",
        awq,
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 64,
            "version": "gemm",
            "zero_point": True,
            "modules_to_not_convert": ["down_proj"],
        },
        {"dense": ["down_proj"]},
    ),
    "qwen2_w4a16_asymmetric": (
        "qwen2",
        compressed,
        compressed_config("pack-quantized", {**GROUPED, "group_size": 64, "symmetric": False}),
        {"tied": True},
    ),
    "llama_w4a16_act_order": (
        "llama",
        compressed,
        compressed_config("pack-quantized", {**GROUPED, "group_size": 32, "symmetric": True, "actorder": "group"}),
        {},
    ),
    "llama_w8a16": (
        "llama",
        compressed,
        compressed_config("pack-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": True}),
        {"head": True},
    ),
    "qwen3_w8a8": (
        "qwen3",
        compressed,
        compressed_config("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": True}, TOKEN),
        {"scales": torch.float32},
    ),
    "qwen3_fp8_block": (
        "qwen3",
        fp8,
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [48, 64],
            "modules_to_not_convert": ["lm_head"],
        },
        {},
    ),
    "qwen3_fp8_block128": (
        "qwen3",
        fp8,
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head"],
        },
        # Blocks of fewer rows, and of fewer columns.
        {"config": {"intermediate_size": 192}},
    ),
    "bitnet_offline": (
        "bitnet",
        bitnet,
        {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"},
        {"tied": True},
    ),
    "bitnet_online": (
        "bitnet",
        bitnet,
        {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"},
        {},
    ),
    "bitnet_bitlinear": (
        "bitnet",
        bitnet,
        {"quant_method": "bitnet", "linear_class": "bitlinear", "quantization_mode": "offline"},
        {},
    ),
    "llama_nf4": ("llama", nf4, nf4_config("float16", False), {}),
    "qwen2_nf4_double": ("qwen2", nf4, nf4_config("bfloat16", True), {"tied": True}),
    "llama_nvfp4": (
        "llama",
        nvfp4,
        compressed_config("nvfp4-pack-quantized", {**FLOATS4, "scale_dtype": "torch.float8_e4m3fn"}),
        {},
    ),
    # Activations are to be NVFP4 too, which nothing here makes of them.
    "qwen3_nvfp4_w4a4": (
        "qwen3",
        nvfp4,
        compressed_config(
            "nvfp4-pack-quantized",
            {**FLOATS4, "scale_dtype": "torch.float8_e4m3fn"},
            {**FLOATS4, "dynamic": "local"},
        ),
        # No whole block of 32 columns at the end.
        {"config": {"intermediate_size": 208}},
    ),
    "llama_fp8_channel": (
        "llama",
        fp8_channel,
        compressed_config("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
        {},
    ),
}


def draw(model, generator):
    """Weights wide enough that every part matters to the logits, exactly f16."""
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
        if weight.dim() == 1:
            weight.data = (1 + 0.3 * noise) if "norm" in name else 0.3 * noise
        elif "embed" in name:
            weight.data = noise
        else:
            weight.data = 1.5 * noise / weight.shape[1] ** 0.5
        weight.data = weight.data.half().float()


def make(name, tools):
    family, method, config, special = MODELS[name]
    model_class, config_class, more = FAMILIES[family]
    generator = torch.Generator().manual_seed(sum(name.encode()))
    tied = special.get("tied", False)
    sizes = {**SHARED, **more, **special.get("config", {})}
    model = model_class(config_class(**sizes, tie_word_embeddings=tied)).float().eval()
    draw(model, generator)
    model.tie_weights()
    tensors, orders, exact_weights = {}, {}, {}
    for path, layer in model.named_modules():
        if not isinstance(layer, torch.nn.Linear) or (path == "lm_head" and not special.get("head")):
            continue
        if any(part in path for part in special.get("dense", [])):
            continue
        packed, exact = method(path, layer.weight.data, {**config, **special}, tools, generator, orders)
        tensors.update({f"{path}.{part}": tensor for part, tensor in packed.items()})
        layer.weight.data = exact_weights[path] = exact
    quantized = {f"{path}.weight" for path in exact_weights}
    for key, tensor in model.state_dict().items():
        if key not in quantized and not (tied and key == "lm_head.weight"):
            tensors[key] = tensor.half()
    if method is bitnet:
        model = with_bitnet_layers(model, tensors, config)
    model = model.double()
    folder = FOLDER / name
    folder.mkdir(exist_ok=True)
    save(folder, {key: tensor.contiguous() for key, tensor in tensors.items()}, special.get("shards", 1))
    model.config.dtype = torch.float16
    model.config.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    written["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n")
    ids = torch.randint(2, SHARED["vocab_size"], (2, 9), generator=generator)
    golden = {}
    if method is bitnet:
        while least_margin(model, ids) < 5e-4:
            ids = torch.randint(2, SHARED["vocab_size"], (2, 9), generator=generator)
        # A prompt, and what the model goes on with, token by token.
        while "next" not in golden:
            golden["prompt"] = torch.randint(2, SHARED["vocab_size"], (1, 9), generator=generator)
            tokens, ahead = greedy(model, golden["prompt"], 6)
            if ahead > 0.05:
                golden["next"] = tokens
    if method in [bitnet, nf4, fp8, fp8_channel, nvfp4]:
        golden["q_proj"] = exact_weights["model.layers.0.self_attn.q_proj"].float()
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
    save_file({"input_ids": ids, "logits": logits.float(), **golden}, folder / "golden.safetensors")
    print(name, sum(f.stat().st_size for f in folder.iterdir()) >> 10, "KiB")


def greedy(model, ids, count):
    """The likeliest tokens behind ids, one after another, and how far one is at least ahead of the second, as a part
    of the largest logit."""
    tokens, ahead = [], []
    for _ in range(count):
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[:, -1]
        best = logits.topk(2).values
        ahead.append(float((best[0, 0] - best[0, 1]) / logits.abs().max()))
        tokens.append(logits.argmax(-1))
        ids = torch.cat([ids, tokens[-1][:, None]], 1)
    return torch.stack(tokens, 1), min(ahead)


def save(folder, tensors, shards):
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    names, place = sorted(tensors), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {key: tensors[key] for key in names[shard::shards]}
        save_file(part, folder / file)
        place.update({key: file for key in part})
    index = {"metadata": {}, "weight_map": place}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


if __name__ == "__main__":
    ours = packers(pathlib.Path(sys.argv[1]))
    for wanted in sys.argv[2:] or MODELS:
        make(wanted, ours)
