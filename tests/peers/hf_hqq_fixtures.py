#!/usr/bin/env python3
"""Tiny checkpoints of HQQ, each layer quantized and saved by hqq's own HQQLinear on a CPU.

  pip install torch==2.15.0 transformers==5.23.0 hqq==0.2.8.post1
  python hf_hqq_fixtures.py tests/fixtures/hf

The config is that of transformers' HqqConfig. hf_model.py says what is in each folder. Weights are decoded by hqq, with scales
and zeros in f64.
"""
import sys
from pathlib import Path

import torch
from hf_model import write
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear, Quantizer

OUT = Path(sys.argv[1])


def hqq(settings):
    def one(module, weight):
        if module.endswith("v_proj"):
            return None  # stays dense
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight.data = weight.clone()
        config = BaseQuantizeConfig(**settings)
        layer = HQQLinear(linear, quant_config=config, compute_dtype=weight.dtype, device="cpu")
        parts = {name: part for name, part in layer.state_dict().items() if part is not None}
        meta = dict(layer.meta, compute_dtype=torch.float64)
        meta |= {name: layer.meta[name].double() for name in ["scale", "zero"]}
        return parts, Quantizer.dequantize(layer.W_q, meta)

    return one


for case, dtype, settings in [
    ("hqq-b1-g32", torch.float16, {"nbits": 1, "group_size": 32, "axis": 1}),
    ("hqq-b2-g64", torch.bfloat16, {"nbits": 2, "group_size": 64, "axis": 1}),
    ("hqq-b3-g64", torch.float16, {"nbits": 3, "group_size": 64, "axis": 1}),
    ("hqq-b4-g64", torch.float16, {"nbits": 4, "group_size": 64, "axis": 1}),
    ("hqq-b8-g128", torch.bfloat16, {"nbits": 8, "group_size": 128, "axis": 1}),
    ("hqq-b4-g64-axis0", torch.bfloat16, {"nbits": 4, "group_size": 64, "axis": 0}),
    ("hqq-b3-g32-axis0", torch.bfloat16, {"nbits": 3, "group_size": 32, "axis": 0}),
]:
    config = {"quant_method": "hqq", "quant_config": BaseQuantizeConfig(**settings), "skip_modules": ["lm_head", "v_proj"]}
    write(OUT / case, config, hqq(settings), dtype=dtype, tolerance=1.0)
