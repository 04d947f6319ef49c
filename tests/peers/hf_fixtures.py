#!/usr/bin/env python3
"""Tiny quantized checkpoints, each written by the tool whose quant_method it names.

  pip install torch==2.15.0 transformers==5.23.0 compressed-tensors==0.20.0 nvidia-modelopt==0.47.0 requests
  pip download --no-deps --no-binary :all: autoawq==0.2.9 && tar xf autoawq-0.2.9.tar.gz
  python hf_fixtures.py autoawq-0.2.9 tests/fixtures/hf

Of AutoAWQ only two files are used, for it does not run with these versions. hf_model.py says what is in each folder.
"""
import sys
import types
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam
from hf_model import packages, write as write_to
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor, e2m1_values
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

AUTOAWQ, OUT = Path(sys.argv[1]), Path(sys.argv[2])
packages(AUTOAWQ, ["awq", "awq.modules", "awq.modules.linear", "awq.utils"])
from awq.modules.linear.gemm import WQLinear_GEMM  # noqa: E402
from awq.utils.packing_utils import dequantize_gemm  # noqa: E402

e2m1_values[8] = -0.0  # the table of ModelOpt drops the sign


def write(case, *rest, **named):
    write_to(OUT / case, *rest, **named)


def awq(group_size):
    def one(module, weight):
        if module.endswith("v_proj"):
            return None  # stays dense
        groups = weight.float().reshape(weight.shape[0], -1, group_size)
        low, high = groups.amin(-1), groups.amax(-1)
        scales = ((high - low) / 15).half()
        zeros = torch.clamp(-torch.round(low / scales), 0, 15)
        clipped = torch.clamp(torch.round(groups / scales.float()[..., None]) + zeros[..., None], 0, 15)
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight.data = ((clipped - zeros[..., None]) * scales.float()[..., None]).reshape(weight.shape)
        layer = WQLinear_GEMM.from_linear(
            linear, 4, group_size, scales=scales.float().t().contiguous(), zeros=zeros.t().contiguous()
        )
        parts = {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales}
        # From scales in f32; mlx-lm rounds the products of scales and zeros to f16 when it imports them.
        return parts, dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), 4, group_size).t()

    return one


def compressed(args, format):
    """By compressed-tensors' compressor; decoded by its own functions, in f32."""

    def one(module, weight):
        if module.endswith("v_proj"):
            return None
        groups = weight.float().reshape(weight.shape[0], -1, args.group_size)
        state = {"weight": weight}
        if format == "nvfp4-pack-quantized":
            state["weight_global_scale"] = generate_gparam(weight.amin().reshape(1), weight.amax().reshape(1))
        scale, zero_point = calculate_qparams(
            groups.amin(-1), groups.amax(-1), args, global_scale=state.get("weight_global_scale")
        )
        state.update(weight_scale=scale.to(weight.dtype), weight_zero_point=zero_point)
        scheme = QuantizationScheme(targets=["Linear"], weights=args, format=format)
        parts = BaseCompressor.get_value_from_registry(format).compress(state, scheme)
        if format == "pack-quantized":
            codes = unpack_from_int32(parts["weight_packed"], 4, weight.shape).float()
            return parts, dequantize(codes, parts["weight_scale"].float(), args=args)
        codes = unpack_fp4_from_uint8(parts["weight_packed"], *weight.shape, dtype=torch.float32)
        if format == "mxfp4-pack-quantized":
            return parts, dequantize(codes, decompress_mx_scale(parts["weight_scale"]).float(), args=args)
        scale, global_scale = parts["weight_scale"].float(), parts["weight_global_scale"]
        peer = dequantize(codes, scale, args=args, global_scale=global_scale)
        # The peer divides each scale; the multiplier is defined as the rounded reciprocal.
        decoded = codes * (scale * (1 / global_scale)).repeat_interleave(args.group_size, 1)
        assert torch.allclose(decoded, peer, rtol=2**-22, atol=0)
        return parts, decoded

    return one


def modelopt(module, weight):
    if module.endswith("v_proj"):
        return None
    tensor, scale, scale_2 = NVFP4QTensor.quantize(weight.float(), 16)
    parts = {"weight": tensor._quantized_data, "weight_scale": scale, "weight_scale_2": scale_2}
    decoded = tensor.dequantize(torch.float32, scale=scale, double_scale=scale_2, block_sizes={-1: 16})
    return dict(parts, input_scale=torch.tensor(0.01)), decoded


def fp8(config):
    quantizer = types.SimpleNamespace(quantization_config=config)

    def one(module, weight):
        parts = Fp8Quantize(quantizer).convert({f"{module}.weight": weight})
        if len(parts) == 1:
            return None  # no whole tiles
        parts = {key.removeprefix(f"{module}."): value for key, value in parts.items()}
        scale = parts["weight_scale_inv"]
        return parts, Fp8Dequantize(quantizer)._dequantize_one(parts["weight"], scale, torch.float32)

    return one


def compressed_config(scheme, format):
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=format, ignore=["lm_head", "re:.*v_proj"], quantization_status="compressed"
    )
    return config.model_dump(mode="json")


write(
    "awq-g64",
    {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 64,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["v_proj"],
    },
    awq(64),
    dtype=torch.float16,
)
for case, preset, format, changes in [
    ("ct-int4-g32", "W4A16", "pack-quantized", {"group_size": 32}),
    ("ct-int4-g128-f32", "W4A16", "pack-quantized", {}),
    ("ct-nvfp4", "NVFP4A16", "nvfp4-pack-quantized", {}),
    ("ct-mxfp4", "MXFP4A16", "mxfp4-pack-quantized", {}),
]:
    scheme = preset_name_to_scheme(preset, ["Linear"])
    scheme.weights = scheme.weights.model_copy(update=changes)
    dtype = torch.float32 if case.endswith("f32") else torch.bfloat16
    write(case, compressed_config(scheme, format), compressed(scheme.weights, format), dtype=dtype)
MODELOPT = {
    "quant_algo": "NVFP4",
    "kv_cache_quant_algo": None,
    "group_size": 16,
    "exclude_modules": ["lm_head", "model.layers.0.self_attn.v_proj"],
}
producer = {"name": "modelopt", "version": "0.47.0"}
write("modelopt-nvfp4", None, modelopt, beside={"hf_quant_config.json": {"producer": producer, "quantization": MODELOPT}})
for case, block, scale_fmt in [("fp8-128x128", [128, 128], "float"), ("fp8-ue8m0-32x32", [32, 32], "ue8m0")]:
    config = FineGrainedFP8Config(weight_block_size=block, scale_fmt=scale_fmt)
    stated = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": block}
    if scale_fmt == "ue8m0":
        stated["scale_fmt"] = scale_fmt
    write(case, stated, fp8(config))
