#!/usr/bin/env python3
"""Tiny random models of many families, as transformers 5.23 publishes them, and its logits.

  pip install torch==2.15 transformers==5.23 safetensors
  python families_transformers.py OUT [FAMILY...]

For every family of families.py, writes OUT/<family>/hf/ with

  config.json        as transformers' save_pretrained writes it
  config_v4.json     the same in published (transformers 4) naming: rope_theta, rope_scaling, ...
  model.safetensors  bf16, as save_pretrained writes it
  refs.safetensors   tokens i32 [T] and logits_f32 [T, V] of transformers in f32 with these bf16 weights

  python families_transformers.py --dequantized OUT [FAMILY...]

reads the dequantized weights that families_mlx.py left in OUT/tmp/<family>/<kind>/, computes their logits with
transformers in f32, and compares them with mlx-lm's in OUT/<family>/<kind>/refs.safetensors, which it replaces where
the two disagree; says so in OUT/report.json.
"""
import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from families import FAMILIES, SEEDS, TOKENS, published

torch.set_num_threads(1)
TOLERANCE = 1e-4


def config_of(name):
    config = published(name)
    model_type = config.pop("model_type")
    if model_type == "internlm3":  # Llama stands for it
        model_type, config["architectures"] = "llama", None
    return transformers.AutoConfig.for_model(model_type, **config)


def randomize(model, seed):
    torch.manual_seed(seed)
    std = 1.2 / model.config.hidden_size**0.5
    with torch.no_grad():
        for key, value in model.state_dict().items():
            if not value.is_floating_point() or key.endswith(("act_fn.beta", "act_fn.eps")):
                continue
            noise = torch.randn(value.shape)
            if "e_score_correction_bias" in key:
                value.copy_(noise * 0.15)
            elif "norm" in key or value.ndim == 1:  # around the neutral value, 0 or 1
                value.copy_(value + noise * 0.2)
                # 1 + weight, as mlx-lm stores it, is exact in bf16 then
                if model.config.model_type.startswith(("qwen3_next", "qwen3_5")):
                    value.copy_((value * 128).round() / 128)
            elif "router" in key or key.endswith((".gate.weight", "shared_expert_gate.weight")):
                value.copy_(noise * std * 2)
            else:
                value.copy_(noise * std)
            value.copy_(value.bfloat16())


def logits_of(model):
    with torch.no_grad():
        return model(torch.tensor([TOKENS]), use_cache=False).logits[0].float()


def load(folder, config):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    bad = {key: value for key, value in info.items() if value}
    assert not bad, bad
    return model.float().eval()


def check(logits, where):
    std = logits.std().item()
    top = logits.topk(2, dim=-1).values
    gap = (top[:, 0] - top[:, 1]).min().item() / std
    assert torch.isfinite(logits).all(), where
    assert 0.3 < std < 10, (where, std)
    assert gap > 1.5e-3, (where, "gap", gap)
    return {"std": round(std, 4), "smallest_top1_top2_gap_in_std": round(gap, 4)}


def save_refs(folder, logits):
    refs = {"tokens": torch.tensor(TOKENS, dtype=torch.int32), "logits_f32": logits.contiguous()}
    save_file(refs, folder / "refs.safetensors")


def update_report(out, name, kind, entry):
    path = out / "report.json"
    report = json.loads(path.read_text()) if path.exists() else {}
    report.setdefault(name, {}).setdefault(kind, {}).update(entry)
    path.write_text(json.dumps(report, indent=1) + "\n")


def write_dense(out, name, seed):
    folder = out / name / "hf"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = config_of(name)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    model.eval()
    randomize(model, seed)
    in_memory = logits_of(model)
    check(in_memory, name)
    model.to(torch.bfloat16)
    for key, value in model.state_dict(keep_vars=True).items():
        if key.endswith("e_score_correction_bias"):  # published in F32
            value.data = value.data.float()
    model.save_pretrained(folder)
    if name == "qwen3_5_moe_text":  # published with stacks of experts, as the model has them in memory
        stacks = {key: value for key, value in model.state_dict().items() if key != "lm_head.weight"}
        save_file(stacks, folder / "model.safetensors", {"format": "pt"})
    for other in set(p.name for p in folder.iterdir()) - {"config.json", "model.safetensors"}:
        (folder / other).unlink()
    logits = logits_of(load(folder, config))
    assert (logits - in_memory).abs().max() < 1e-4, (logits - in_memory).abs().max()
    v4 = published(name)
    written = json.loads((folder / "config.json").read_text())
    v4["architectures"] = v4.get("architectures") or written["architectures"]
    v4 = dict(sorted(v4.items()))
    (folder / "config_v4.json").write_text(json.dumps(v4, indent=2) + "\n")
    if name == "internlm3":
        (folder / "config.json").write_text(json.dumps(v4, indent=2) + "\n")
    save_refs(folder, logits)
    update_report(out, name, "hf", check(logits, name) | {"logits_by": f"transformers {transformers.__version__}"})
    with safe_open(folder / "model.safetensors", "pt") as file:
        shapes = {key: [file.get_slice(key).get_dtype()] + file.get_slice(key).get_shape() for key in file.keys()}
    (folder.parent / "tensors.txt").write_text("".join(f"{key} {shape}\n" for key, shape in shapes.items()))
    print(name, check(logits, name), {p.name: p.stat().st_size for p in folder.iterdir()}, flush=True)


def compare_dequantized(out, name):
    for source in sorted((out / "tmp" / name).glob("*")):
        kind = source.name
        folder = out / name / kind
        logits = logits_of(load(source, config_of(name)))
        mlx = load_file(source / "mlx_logits.safetensors")["logits_f32"]
        difference = ((logits - mlx).abs().max() / logits.std()).item()
        agrees = difference <= TOLERANCE
        save_refs(folder, mlx if agrees else logits)
        who = "mlx-lm 0.32.2 in f32, quantized weights" if agrees else (
            f"transformers {transformers.__version__} in f32 with the weights dequantized by mx.dequantize"
        )
        if agrees:
            why = "agrees with transformers on the dequantized weights"
        else:
            why = "mlx-lm computes this family otherwise" if difference == difference else "mlx-lm fails on it"
        difference = difference if difference == difference else None  # NaN: it failed
        entry = {"difference_mlx_transformers_in_std": difference, "logits_by": who, "why": why}
        update_report(out, name, kind, check(mlx if agrees else logits, (name, kind)) | entry)
        print(name, kind, "difference", difference, who, flush=True)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--dequantized", action="store_true")
parser.add_argument("out", type=Path)
parser.add_argument("--seed", type=int)
parser.add_argument("families", nargs="*")
args = parser.parse_args()
failed = []
for family in args.families or FAMILIES:
    try:
        if args.dequantized:
            compare_dequantized(args.out, family)
        else:
            write_dense(args.out, family, args.seed or SEEDS.get(family, 20))
    except Exception as error:
        failed.append(family)
        if args.families:
            raise
        print(f"{family}: {type(error).__name__}: {str(error)[:600]}", flush=True)
sys.exit(f"failed: {failed}" if failed else 0)
