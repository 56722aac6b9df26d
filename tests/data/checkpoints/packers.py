"""Packs a weight with a format's own project, and reads it back: each function gives the tensors of a layer and the
weight in float64 that they stand for."""

import importlib
import sys
import types

import bitsandbytes.functional
import torch

# transformers compiles BitNet's layers, which takes longer than all else here.
torch._dynamo.config.disable = True

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from transformers.integrations import bitnet as bitnet_layers

# Matrices that share their input have one order of columns.
SITES = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "up", "up_proj": "up"}


def package(name, path):
    """An empty package over a folder, so that its modules are imported without its __init__."""
    module = types.ModuleType(name)
    module.__path__ = [str(path)]
    sys.modules[name] = module


def packers(folder):
    """AutoGPTQ's and AutoAWQ's layers."""
    gptq, awq = folder / "auto_gptq", folder / "autoawq-0.2.9" / "awq"
    for name in ["", "/nn_modules", "/nn_modules/qlinear"]:
        package("auto_gptq" + name.replace("/", "."), f"{gptq}{name}")
    for name in ["", "/modules", "/modules/linear", "/utils"]:
        package("awq" + name.replace("/", "."), f"{awq}{name}")
    gptq = importlib.import_module("auto_gptq.nn_modules.qlinear.qlinear_cuda").QuantLinear
    # What it needs of a module that imports much more.
    device = types.ModuleType("awq.utils.utils")
    device.get_best_device = lambda: "cpu"
    sys.modules[device.__name__] = device
    linear = importlib.import_module("awq.modules.linear.gemm")
    return gptq, linear.WQLinear_GEMM, linear.dequantize_gemm


def round_to_groups(weight, bits, groups, symmetric, generator):
    """Scales [N, G], exactly f16, and zero points [N, G] for columns of these groups."""
    n, count = weight.shape[0], int(groups.max()) + 1
    scales, zeros = torch.zeros(n, count), torch.zeros(n, count)
    top = 2**bits - 1
    for g in range(count):
        part = weight[:, groups == g]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            scales[:, g] = 2 * torch.maximum(high, -low) / top
            zeros[:, g] = 2 ** (bits - 1)
        else:
            scales[:, g] = (high - low) / top
            zeros[:, g] = (-low / scales[:, g]).round()
    # A zero point of 0 is what version 1 of GPTQ's layout cannot say.
    return scales.half().float(), zeros.clamp(1, top)


def codes_of(weight, scales, zeros, groups, bits):
    return ((weight / scales[:, groups]).round() + zeros[:, groups]).clamp(0, 2**bits - 1)


def gptq(name, weight, option, tools, generator, orders):
    """AutoGPTQ's tensors, and the weight that they stand for."""
    n, k = weight.shape
    bits, group = option["bits"], option["group_size"]
    size = k if group == -1 else group
    groups = torch.arange(k) // size
    if option["desc_act"]:
        site = SITES.get(name.split(".")[-1], name)
        if option.get("own_orders"):
            site = name
        if site not in orders:
            orders[site] = torch.randperm(k, generator=generator)
        groups = torch.empty(k, dtype=torch.long)
        groups[orders[site]] = torch.arange(k) // size
    scales, zeros = round_to_groups(weight, bits, groups, option["sym"], generator)
    codes = codes_of(weight, scales, zeros, groups, bits)
    exact = (codes - zeros[:, groups]).double() * scales[:, groups].double()
    linear = torch.nn.Linear(k, n, bias=False)
    linear.weight.data = exact.half()
    layer = tools[0](bits, size, k, n, False, weight_dtype=torch.float16)
    layer.pack(linear, scales.half(), zeros.clone(), groups.to(torch.int32))
    tensors = {part: getattr(layer, part).clone() for part in ["qweight", "qzeros", "scales", "g_idx"]}
    if option.get("checkpoint_format") == "gptq_v2":
        tensors["qzeros"] += 0x11111111
    # As AutoGPTQ's own product reads them, where it has no kernel.
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    read = (tensors["qweight"].unsqueeze(1) >> shifts.view(1, -1, 1)) & (2**bits - 1)
    assert torch.equal(read.reshape(k, n).t().float(), codes)
    return tensors, exact


def awq(name, weight, option, tools, generator, orders):
    """AutoAWQ's tensors, and the weight that they stand for."""
    n, k = weight.shape
    groups = torch.arange(k) // option["group_size"]
    scales, zeros = round_to_groups(weight, 4, groups, False, generator)
    codes = codes_of(weight, scales, zeros, groups, 4)
    exact = (codes - zeros[:, groups]).double() * scales[:, groups].double()
    linear = torch.nn.Linear(k, n, bias=False)
    linear.weight.data = exact.float()
    layer = tools[1].from_linear(
        linear, 4, option["group_size"], scales=scales.t().contiguous(), zeros=zeros.t().contiguous()
    )
    tensors = {part: getattr(layer, part).cpu().clone() for part in ["qweight", "qzeros", "scales"]}
    read = tools[2](tensors["qweight"], tensors["qzeros"], tensors["scales"], 4, option["group_size"])
    assert (read.t().double() - exact).abs().max() <= 1e-3 * exact.abs().max()
    return tensors, exact


def compressed(name, weight, option, tools, generator, orders):
    """compressed-tensors' tensors, and the weight that they stand for."""
    n, k = weight.shape
    arguments = option["config_groups"]["group_0"]
    # Later versions of compressed-tensors have no act order; checkpoints of earlier ones do.
    arguments = {key: dict(value) for key, value in arguments.items() if isinstance(value, dict)}
    act_order = arguments["weights"].pop("actorder", None) == "group"
    weights = QuantizationArgs(**arguments["weights"])
    size = weights.group_size if weights.strategy == "group" else k
    groups = torch.arange(k) // size
    if act_order:
        groups = groups[torch.randperm(k, generator=generator)]
    scales, zeros = round_to_groups(weight, weights.num_bits, groups, weights.symmetric, generator)
    middle = 2 ** (weights.num_bits - 1)
    codes = codes_of(weight, scales, zeros, groups, weights.num_bits)
    exact = (codes - zeros[:, groups]).double() * scales[:, groups].double()
    inputs = arguments.get("input_activations")
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=weights,
        input_activations=QuantizationArgs(**inputs) if inputs else None,
    )
    # The compressor takes columns whose groups are in order.
    order = torch.argsort(groups, stable=True)
    state = {
        "weight": exact[:, order].float(),
        "weight_scale": scales.clone(),
        "weight_zero_point": (zeros - middle).to(torch.int8),
    }
    compressor = BaseCompressor.load_from_registry(option["format"])
    tensors = compressor.compress(state, scheme)
    read = compressor.decompress(dict(tensors), scheme)["weight"].double()
    assert (read - exact[:, order]).abs().max() <= 1e-6 * exact.abs().max()
    tensors["weight_scale"] = tensors["weight_scale"].to(option.get("scales", torch.float16))
    if act_order:
        # Codes go back to the columns' own order, as llm-compressor saved them.
        tensors["weight_packed"] = pack_to_int32((codes - middle).to(torch.int8), weights.num_bits)
        tensors["weight_g_idx"] = groups.to(torch.int32)
    return tensors, exact


def fp8(name, weight, option, tools, generator, orders):
    """e4m3 by torch's own cast with a scale for each block, and the weight that it stands for."""
    high, wide = option["weight_block_size"]
    n, k = weight.shape
    rows, cols = torch.arange(n) // high, torch.arange(k) // wide
    scales = torch.zeros(int(rows.max()) + 1, int(cols.max()) + 1)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            scales[i, j] = weight[rows == i][:, cols == j].abs().max() / 448
    each = scales[rows][:, cols]
    codes = (weight / each).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales}, codes.double() * each.double()


def fp8_channel(name, weight, option, tools, generator, orders):
    """compressed-tensors' tensors, and the weight that they stand for."""
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(**option["config_groups"]["group_0"]["weights"])
    )
    scales = weight.abs().amax(1, keepdim=True) / 448
    compressor = BaseCompressor.load_from_registry(option["format"])
    tensors = compressor.compress({"weight": weight, "weight_scale": scales}, scheme)
    exact = tensors["weight"].double() * scales.double()
    read = compressor.decompress(dict(tensors), scheme)["weight"].double()
    assert (read - exact).abs().max() <= 1e-6 * exact.abs().max()
    return tensors, exact


def nvfp4(name, weight, option, tools, generator, orders):
    """compressed-tensors' tensors, and the weight that they stand for."""
    group = option["config_groups"]["group_0"]
    inputs = group.get("input_activations")
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**group["weights"]),
        input_activations=QuantizationArgs(**inputs) if inputs else None,
    )
    low, high = weight.amin(), weight.amax()
    whole = generate_gparam(low, high)
    groups = weight.unflatten(1, (-1, 16))
    scales, _ = calculate_qparams(groups.amin(2), groups.amax(2), scheme.weights, whole)
    state = {"weight": weight, "weight_scale": scales, "weight_global_scale": whole}
    if inputs:
        state["input_global_scale"] = torch.tensor([2688.0 / 4])
    compressor = BaseCompressor.load_from_registry(option["format"])
    tensors = compressor.compress(state, scheme)
    packed = tensors["weight_packed"]
    codes = torch.stack([packed & 15, packed >> 4], 2).flatten(1).long()
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    numbers = magnitudes[codes & 7] * torch.where(codes < 8, 1, -1)
    exact = numbers * tensors["weight_scale"].double().repeat_interleave(16, 1) / whole.double()
    read = compressor.decompress(dict(tensors), scheme)["weight"].double()
    # It reads numbers of bf16.
    assert ((read - exact).abs() <= 1e-2 * exact.abs()).all()
    return tensors, exact


def bitnet(name, weight, option, tools, generator, orders):
    """transformers' tensors of one of BitNet's layers, and the weight that they stand for."""
    exact = bitnet_layers.WeightQuant.apply(weight)
    if option.get("quantization_mode") == "online":
        return {"weight": weight.half()}, exact.double()
    scale = weight.abs().mean()
    if option["linear_class"] == "bitlinear":
        scale = 1 / scale
    scale = scale.bfloat16().reshape(1)
    codes = exact.sign()
    packed = bitnet_layers.pack_weights(codes.clone())
    assert torch.equal(bitnet_layers.unpack_weights(packed, torch.float32), codes)
    by = 1 / scale.double() if option["linear_class"] == "bitlinear" else scale.double()
    return {"weight": packed, "weight_scale": scale}, codes.double() * by


def nf4(name, weight, option, tools, generator, orders):
    """bitsandbytes' tensors, and the weight that they stand for."""
    functional = bitsandbytes.functional
    packed, state = functional.quantize_4bit(
        weight.to(getattr(torch, option["bnb_4bit_compute_dtype"])),
        blocksize=64,
        compress_statistics=option["bnb_4bit_use_double_quant"],
        quant_type="nf4",
    )
    tensors = {"weight": packed, **{f"weight.{part}": t for part, t in state.as_dict(packed=True).items()}}
    read = functional.QuantState.from_dict(state.as_dict(packed=True), device="cpu")
    # Without the rounding to the dtype of the weights that were quantized.
    read.dtype = torch.float32
    return tensors, functional.dequantize_4bit(packed, read).double()
