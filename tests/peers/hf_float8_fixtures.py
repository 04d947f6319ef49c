#!/usr/bin/env python3
"""Tiny checkpoints with 8-bit floats, written by compressed-tensors and ModelOpt.

  pip install torch==2.15.0 transformers==5.23.0 compressed-tensors==0.20.0 nvidia-modelopt==0.47.0
  python hf_float8_fixtures.py tests/fixtures/hf

hf_model.py says what is in each folder. Weights are decoded by the tool's own functions from scales in f32.
"""
import sys
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils.helpers import calculate_qparams
from hf_model import write
from modelopt.torch.export.quant_utils import to_quantized_weight
from modelopt.torch.quantization.qtensor import FP8QTensor

OUT = Path(sys.argv[1])
EIGHT = QuantizationArgs(num_bits=8, type="float", strategy="token", dynamic=True, symmetric=True)


def float8(scheme):
    def one(module, weight):
        if module.endswith("v_proj"):
            return None
        rows, columns = scheme.weights.block_structure or (1, weight.shape[1])
        if scheme.weights.strategy == "tensor":
            rows = weight.shape[0]
        if weight.shape[0] % rows or weight.shape[1] % columns:
            return None
        tiles = weight.float().reshape(weight.shape[0] // rows, rows, -1, columns)
        scale, zero_point = calculate_qparams(tiles.amin((1, 3)), tiles.amax((1, 3)), scheme.weights)
        scale, zero_point = (values.reshape(tiles.shape[0], tiles.shape[2]) for values in (scale, zero_point))
        if scheme.weights.strategy == "tensor":
            scale, zero_point = scale.reshape(1), zero_point.reshape(1)
        state = {"weight": weight, "weight_scale": scale.to(weight.dtype), "weight_zero_point": zero_point}
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        parts = compressor.compress(state, scheme)
        decoded = compressor.decompress(dict(parts, weight_scale=parts["weight_scale"].float()), scheme)
        return parts, decoded["weight"].float()

    return one


for case, strategy, block in [
    ("ct-fp8-tensor", "tensor", None),
    ("ct-fp8-channel", "channel", None),
    ("ct-fp8-block", "block", [64, 64]),
]:
    args = QuantizationArgs(num_bits=8, type="float", strategy=strategy, symmetric=True, block_structure=block)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=EIGHT, format="float-quantized")
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format="float-quantized",
        ignore=["lm_head", "re:.*v_proj"],
        quantization_status="compressed",
    )
    write(OUT / case, config.model_dump(mode="json"), float8(scheme), dtype=torch.bfloat16)


def modelopt(algorithm):
    def one(module, weight):
        if module.endswith("v_proj"):
            return None
        of_rows = algorithm == "fp8_pc_pt"
        scale = weight.float().abs().amax(-1 if of_rows else None) / 448
        codes = to_quantized_weight(weight, scale, algorithm)
        expanded = scale[:, None] if of_rows else scale
        decoded = FP8QTensor(weight.shape, torch.float32, codes).dequantize(torch.float32, scale=expanded, block_sizes=None)
        return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.01)}, decoded

    return one


for case, algorithm, name in [("modelopt-fp8", "fp8", "FP8"), ("modelopt-fp8-rows", "fp8_pc_pt", "FP8_PER_CHANNEL_PER_TOKEN")]:
    settings = {"quant_algo": name, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "model.layers.0.self_attn.v_proj"]}
    producer = {"name": "modelopt", "version": "0.47.0"}
    write(OUT / case, dict(settings, quant_method="modelopt", producer=producer), modelopt(algorithm), dtype=torch.bfloat16)
