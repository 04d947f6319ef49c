#!/usr/bin/env python3
"""Tiny random models whose experts lie in ways of their own, as published and as mlx-lm quantizes them.

  pip install 'mlx[cpu]==0.32' 'mlx-lm==0.32.2'
  python expert_layouts.py tests/fixtures/convert/layouts

  gpt_oss/hf   as transformers saves it in BF16 (modeling_gpt_oss.py): experts are parameters [E, in, out], columns of gate
               and up projections alternate; mlx-lm reads only its MXFP4 form
  llama4/hf    as published: inside a model of more than text, experts are parameters [E, in, out], gates before ups
  */mlx-*      the same weights as mlx-lm holds them, quantized by its quantize_model

Then `families_convert.py BINARY tests/fixtures/convert/layouts` compares. (layouts/qwen3_next is of families_transformers.py
and families_mlx.py, as those in tests/fixtures/families.)
"""
import json
import shutil
import sys
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import gpt_oss, llama4
from mlx_lm.utils import quantize_model, save_config, save_model

mx.set_default_device(mx.cpu)
mx.random.seed(7)
KINDS = {"mlx-affine4": (32, 4, "affine"), "mlx-mxfp4": (32, 4, "mxfp4")}
SIZES = dict(num_hidden_layers=2, num_local_experts=4, vocab_size=96, hidden_size=64, intermediate_size=32, head_dim=32,
             num_attention_heads=2, num_key_value_heads=1, rope_theta=10000)
CONFIGS = {
    "gpt_oss": SIZES | dict(model_type="gpt_oss", num_experts_per_tok=2, sliding_window=8, rms_norm_eps=1e-5,
                            layer_types=["sliding_attention", "full_attention"], max_position_embeddings=128),
    "llama4": dict(model_type="llama4", torch_dtype="bfloat16", text_config=SIZES | dict(
        model_type="llama4_text", attention_bias=False, attention_chunk_size=8, interleave_moe_layer_step=1,
        intermediate_size_mlp=96, max_position_embeddings=128, num_experts_per_tok=1, rms_norm_eps=1e-5, rope_scaling=None,
        use_qk_norm=True, moe_layers=[0, 1], no_rope_layers=[1, 1])),
}


def to_hf(name, weights):
    out = {}
    for path, value in weights.items():
        if ".experts." not in path:
            out[path] = value
        elif ".gate_proj." in path:
            up = weights[path.replace("gate_proj", "up_proj")]
            if path.endswith("bias"):
                out[path.replace("gate_proj.bias", "gate_up_proj_bias")] = mx.stack([value, up], axis=-1).flatten(-2)
            elif name == "gpt_oss":
                both = mx.stack([value, up], axis=2).flatten(1, 2)
                out[path.replace("gate_proj.weight", "gate_up_proj")] = both.swapaxes(1, 2)
            else:
                out[path.replace("gate_proj.weight", "gate_up_proj")] = mx.concatenate([value, up], axis=1).swapaxes(1, 2)
        elif ".down_proj." in path:
            swapped = path.replace(".weight", "").replace(".bias", "_bias")
            out[swapped] = value if path.endswith("bias") else value.swapaxes(1, 2)
    return {path: mx.contiguous(value) for path, value in out.items()}


out = Path(sys.argv[1])
for name, config in CONFIGS.items():
    module = {"gpt_oss": gpt_oss, "llama4": llama4}[name]
    model = module.Model(module.ModelArgs.from_dict(config))
    weights = {k: (mx.random.normal(v.shape) * 0.3).astype(mx.bfloat16) for k, v in tree_flatten(model.parameters())}
    folder = out / name / "hf"
    shutil.rmtree(out / name, ignore_errors=True)
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "model.safetensors"), to_hf(name, weights), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for kind, (group_size, bits, mode) in KINDS.items():
        model = module.Model(module.ModelArgs.from_dict(config))
        model.update(tree_unflatten(list(weights.items())))
        model, quantized = quantize_model(model, dict(config), group_size, bits, mode=mode)
        target = out / name / kind
        save_model(target, model)
        save_config(quantized, target / "config.json")
        (target / "model.safetensors.index.json").unlink()
