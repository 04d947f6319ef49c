#!/usr/bin/env python3
"""Tiny checkpoints with integer and 4-bit codes, each written by the tool whose quant_method it names.

  pip install torch==2.15.0 transformers==5.23.0 compressed-tensors==0.20.0 bitsandbytes==0.50.2
  pip download --no-deps --no-binary :all: autoawq==0.2.9 && tar xf autoawq-0.2.9.tar.gz
  pip download --no-deps auto-gptq==0.7.1 && unzip auto_gptq-0.7.1-*.whl -d auto_gptq-0.7.1
  pip download --no-deps --no-binary :all: gptqmodel==7.7.0 && tar xf gptqmodel-7.7.0.tar.gz
  pip install accelerate device-smi logbar pypcre threadpoolctl
  python hf_integer_fixtures.py autoawq-0.2.9 auto_gptq-0.7.1 gptqmodel-7.7.0 tests/fixtures/hf

Of AutoAWQ, AutoGPTQ and GPTQModel only the modules that pack are used, for the rest does not run with these versions, or wants
a compiler. hf_model.py says what is in each folder. Weights are decoded by the tools' own functions with scales in f32.
"""
import sys
from pathlib import Path

import torch
from bitsandbytes.functional import QuantState, dequantize_4bit, dequantize_blockwise, quantize_4bit
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils.helpers import calculate_qparams
from hf_model import packages, write

AUTOAWQ, AUTOGPTQ, GPTQMODEL, OUT = map(Path, sys.argv[1:])
packages(AUTOAWQ, ["awq", "awq.modules", "awq.modules.linear", "awq.utils"])
packages(AUTOGPTQ, ["auto_gptq", "auto_gptq.nn_modules", "auto_gptq.nn_modules.qlinear"])
packages(GPTQMODEL, ["gptqmodel", "gptqmodel.nn_modules", "gptqmodel.models"])
sys.modules["gptqmodel"].DEBUG_ON = False
from auto_gptq.nn_modules.qlinear.qlinear_cuda_old import QuantLinear  # noqa: E402
from awq.modules.linear.gemm import WQLinear_GEMM  # noqa: E402
from awq.modules.linear.gemv import WQLinear_GEMV  # noqa: E402
from awq.modules.linear.gemv_fast import WQLinear_GEMVFast  # noqa: E402
from awq.modules.linear.marlin import WQLinear_Marlin  # noqa: E402
from awq.utils.packing_utils import dequantize_gemm  # noqa: E402
from gptqmodel.nn_modules.qlinear.torch import TorchLinear  # noqa: E402


def parameters(weight, bits, group_size, symmetric, least_zero=0):
    """Scales and zeros of round to nearest, F32 [N, groups], and the weight that they stand for."""
    groups = weight.float().reshape(weight.shape[0], -1, group_size)
    largest, middle = 2**bits - 1, 2 ** (bits - 1)
    if symmetric:
        scales = (groups.abs().amax(-1) / (middle - 0.5)).half()
        zeros = torch.full_like(scales, middle)
    else:
        low, high = groups.amin(-1), groups.amax(-1)
        scales = ((high - low) / largest).half()
        zeros = torch.clamp(-torch.round(low / scales), least_zero, largest)
    scales, zeros = scales.float(), zeros.float()
    codes = torch.clamp(torch.round(groups / scales[..., None]) + zeros[..., None], 0, largest)
    return scales, zeros, ((codes - zeros[..., None]) * scales[..., None]).reshape(weight.shape)


def linear_of(weight):
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data = weight
    return linear


def gptq(bits, group_size, symmetric):
    """By AutoGPTQ, whose zeros are stored less one: 0 is none of them."""

    def one(module, weight):
        if module.endswith("v_proj"):
            return None  # stays dense
        size = weight.shape[1] if group_size == -1 else group_size
        scales, zeros, rounded = parameters(weight, bits, size, symmetric, least_zero=1)
        layer = QuantLinear(bits, group_size, weight.shape[1], weight.shape[0], bias=False)
        index = torch.arange(weight.shape[1]) // size
        linear = linear_of(rounded.half().float())
        layer.pack(linear, scales, zeros, index)
        parts = {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales.half()}
        parts["g_idx"] = index.int()
        layer.scales = parts["scales"].float()
        layer.autogptq_cuda_available = False
        decoded = layer(torch.eye(weight.shape[1])).t()
        assert torch.equal(decoded, rounded)
        return parts, decoded

    return one


def gptq_v2(bits, group_size):
    """By GPTQModel, with zeros as they are."""

    def one(module, weight):
        if module.endswith("v_proj"):
            return None
        scales, zeros, rounded = parameters(weight, bits, group_size, False)
        n, k = weight.shape
        layer = TorchLinear(bits, group_size, sym=False, desc_act=False, in_features=k, out_features=n, bias=False)
        layer.pack_original(linear_of(rounded), scales, zeros, torch.arange(k, dtype=torch.int32) // group_size)
        layer.post_init()
        parts = {name: getattr(layer, name) for name in ["qweight", "qzeros", "scales", "g_idx"]}
        layer.scales = layer.scales.float()
        decoded = layer.dequantize_weight().t()
        assert torch.equal(decoded, rounded)
        return parts, decoded

    return one


def gptq_config(bits, group_size, symmetric, **others):
    settings = {"bits": bits, "group_size": group_size, "sym": symmetric, "desc_act": False, "damp_percent": 0.01}
    return {"quant_method": "gptq", **settings, "static_groups": False, "true_sequential": True, **others}


def awq(kind, group_size):
    """By AutoAWQ, which has no decoder of these layouts for a CPU: the numbers that went in come out."""

    def one(module, weight):
        if module.endswith("v_proj"):
            return None
        scales, zeros, rounded = parameters(weight, 4, group_size, False)
        layer = kind.from_linear(linear_of(rounded), 4, group_size, scales=scales, zeros=zeros)
        parts = {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales}
        if kind is WQLinear_GEMV:
            return parts, rounded
        wide = lambda values: values.repeat_interleave(group_size, 1)  # noqa: E731
        codes = torch.round(rounded / wide(scales)) + wide(zeros)
        biases = layer.qzeros.t()[:, : scales.shape[1]].float()
        return parts, codes * wide(scales) + wide(biases)

    return one


def awq_rows(module, weight):
    """By AutoAWQ with a group for each row: its layer takes -1, its packer only what that means. Decoded by it from scales in f32."""
    if module.endswith("v_proj"):
        return None
    scales, zeros, rounded = parameters(weight, 4, weight.shape[1], False)
    transposed = {"scales": scales.t().contiguous(), "zeros": zeros.t().contiguous()}
    layer = WQLinear_GEMM.from_linear(linear_of(rounded), 4, weight.shape[1], **transposed)
    parts = {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales}
    exact = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), 4, layer.group_size).t()
    return parts, exact


def awq_marlin(module, weight):
    """By AutoAWQ, for kernels that it has for GPUs alone: symmetric, and rows in whole 64s. What went in comes out."""
    if weight.shape[0] % 64 != 0:
        return None
    scales, _, rounded = parameters(weight, 4, 128, True)
    layer = WQLinear_Marlin.from_linear(linear_of(rounded), 4, 128, scales=scales)
    return {"qweight": layer.qweight, "scales": layer.scales}, rounded


def awq_config(group_size, version):
    return {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": version}


def compressed(scheme):
    """By compressed-tensors' compressor, decoded by it from scales in f32."""

    def one(module, weight):
        if module.endswith("v_proj"):
            return None
        size = scheme.weights.group_size or weight.shape[1]
        groups = weight.float().reshape(weight.shape[0], -1, size)
        scale, zero_point = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
        state = {"weight": weight, "weight_scale": scale.to(weight.dtype), "weight_zero_point": zero_point}
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        parts = compressor.compress(state, scheme)
        decoded = compressor.decompress(dict(parts, weight_scale=parts["weight_scale"].float()), scheme)
        return parts, decoded["weight"]

    return one


def compressed_config(scheme):
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=scheme.format,
        ignore=["lm_head", "re:.*v_proj"],
        quantization_status="compressed",
    )
    return config.model_dump(mode="json")


def four_bits(kind, block, nested):
    """By bitsandbytes on a CPU, saved and loaded as its Linear4bit does both, decoded to f32.

    Its decoder for the CPU is compared only where blocks do not run across rows, for there it is wrong: that for CUDA and
    the one in torch see the flattened matrix, as the quantizer does.
    """

    def one(module, weight):
        if module.endswith("v_proj"):
            return None
        codes, state = quantize_4bit(weight, blocksize=block, compress_statistics=nested, quant_type=kind)
        saved = state.as_dict(packed=True)
        parts = {"weight": codes} | {f"weight.{name}": value.clone() for name, value in saved.items()}
        state = QuantState.from_dict(dict(saved), device=torch.device("cpu"))
        state.dtype = torch.float32
        absmax = dequantize_blockwise(state.absmax, state.state2) + state.offset if nested else state.absmax
        indices = torch.stack([codes.flatten() >> 4, codes.flatten() & 15], 1).flatten().long()
        decoded = (state.code[indices].reshape(-1, block) * absmax[:, None]).reshape(weight.shape)
        assert weight.shape[1] % block != 0 or torch.equal(decoded, dequantize_4bit(codes, state))
        return parts, decoded

    return one


def int8(module, weight):
    """By bitsandbytes on a CPU. Its own decoder rounds a product more; the exact products are beside it."""
    if module.endswith("v_proj"):
        return None
    codes, scales, _ = torch.ops.bitsandbytes.int8_vectorwise_quant(weight.half(), 0.0)
    peer = torch.ops.bitsandbytes.int8_vectorwise_dequant(codes, scales)
    decoded = codes.float() * (scales * (1 / 127)).reshape(-1, 1)
    assert torch.allclose(decoded, peer, rtol=2**-22, atol=0)
    return {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}, decoded


def bitsandbytes_config(**settings):
    return {"quant_method": "bitsandbytes", "llm_int8_threshold": 6.0, "llm_int8_skip_modules": ["v_proj"], **settings}


for case, bits, group_size, symmetric in [
    ("gptq-b2-g64", 2, 64, False),
    ("gptq-b3-g32", 3, 32, False),
    ("gptq-b4-g128", 4, 128, True),
    ("gptq-b8-channel", 8, -1, False),
]:
    config = gptq_config(bits, group_size, symmetric)
    write(OUT / case, config, gptq(bits, group_size, symmetric), dtype=torch.float16, tolerance=0.6 / 2 ** (bits - 1))
config = gptq_config(4, 32, False, checkpoint_format="gptq_v2", meta={"quantizer": ["gptqmodel:7.7.0"]})
write(OUT / "gptq-v2-b4-g32", config, gptq_v2(4, 32), dtype=torch.float16)

for case, kind, group_size, version in [
    ("awq-gemv-g64", WQLinear_GEMV, 64, "gemv"),
    ("awq-gemv_fast-g32", WQLinear_GEMVFast, 32, "gemv_fast"),
]:
    write(OUT / case, awq_config(group_size, version), awq(kind, group_size), dtype=torch.float16)
write(OUT / "awq-rows", awq_config(-1, "gemm"), awq_rows, dtype=torch.float16)
# One group for rows of 128, which has an order of scales of its own, and two for those of 256.
write(OUT / "awq-marlin-g128", awq_config(128, "marlin") | {"zero_point": False}, awq_marlin, dtype=torch.float16)

EIGHT = QuantizationArgs(num_bits=8, strategy="token", dynamic=True, symmetric=True)
for case, args, format, activations in [
    ("ct-int4-asym-g64", {"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False}, "pack-quantized", None),
    ("ct-int8-channel", {"num_bits": 8, "strategy": "channel", "symmetric": True}, "pack-quantized", None),
    ("ct-w8a8", {"num_bits": 8, "strategy": "channel", "symmetric": True}, "int-quantized", EIGHT),
]:
    args = QuantizationArgs(type="int", **args)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=activations, format=format)
    write(OUT / case, compressed_config(scheme), compressed(scheme), dtype=torch.bfloat16)

for case, kind, block, nested in [
    ("bnb-fp4", "fp4", 128, True),
    ("bnb-nf4", "nf4", 64, False),
    ("bnb-nf4-b512", "nf4", 512, True),
    ("bnb-nf4-nested", "nf4", 64, True),
]:
    config = bitsandbytes_config(
        load_in_4bit=True, load_in_8bit=False, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=nested,
        bnb_4bit_quant_storage="uint8", bnb_4bit_compute_dtype="bfloat16",
    )
    write(OUT / case, config, four_bits(kind, block, nested), dtype=torch.bfloat16, tolerance=0.1)
write(OUT / "bnb-int8", bitsandbytes_config(load_in_4bit=False, load_in_8bit=True), int8, dtype=torch.float16)
