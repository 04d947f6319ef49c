#!/usr/bin/env python3
"""Logits of a gpt-oss checkpoint as it was published, by transformers in f32 on decoded experts.

  pip install torch==2.15.0 transformers==5.23.0
  python gpt_oss_logits.py tests/fixtures/mlx/gptoss-mxfp4-hf

mlx-lm 0.32.2 does not read `truncate` of the rope scaling, transformers does. Writes transformers.safetensors:
logits_f32 f32 [T, V] for the tokens of refs.safetensors.
"""
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

folder = Path(sys.argv[1])
settings = json.loads((folder / "config.json").read_text())
for key in ["quantization_config", "torch_dtype", "architectures", "model_type"]:
    settings.pop(key)
rope = dict(settings.pop("rope_scaling"), rope_theta=settings.pop("rope_theta"))
config = GptOssConfig(**settings, rope_parameters=rope, attn_implementation="eager")
model = GptOssForCausalLM(config).float()
stored, weights = load_file(folder / "model.safetensors"), {}
for name, value in stored.items():
    if name.endswith("_blocks"):
        codes = torch.stack([value & 15, value >> 4], -1).long().flatten(-2)
        scales = torch.exp2(stored[name.replace("_blocks", "_scales")].float() - 127)
        weights[name.removesuffix("_blocks")] = (E2M1[codes] * scales[..., None]).flatten(2).transpose(1, 2)
    elif not name.endswith("_scales"):
        weights[name] = value.float()
model.load_state_dict(weights)
tokens = load_file(folder / "refs.safetensors")["tokens"]
with torch.no_grad():
    logits = model(tokens[None].long()).logits[0].contiguous()
save_file({"tokens": tokens, "logits_f32": logits}, folder / "transformers.safetensors")
