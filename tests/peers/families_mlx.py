#!/usr/bin/env python3
"""The tiny models of families_transformers.py, converted and computed by mlx-lm.

  pip install 'mlx[cpu]==0.32' 'mlx-lm==0.32.2'
  python families_mlx.py OUT [FAMILY...]

Loads OUT/<family>/hf with the config in published naming (config_v4.json: mlx-lm 0.32.2 does not read rope_parameters)
and writes into OUT/report.json how far mlx-lm's logits in f32 are from transformers'. Then quantizes as mlx_lm.convert
does, to affine (4 bits, groups of 32) and to mxfp4, into OUT/<family>/mlx-affine4 and OUT/<family>/mlx-mxfp4:

  config.json, model.safetensors   as mlx_lm.convert writes them
  refs.safetensors                 tokens i32 [T] and logits_f32 [T, V] of mlx-lm in f32 (every float parameter upcast)

and, for families_transformers.py --dequantized, the dequantized weights under their Hugging Face names into OUT/tmp.
"""
import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_map_with_path
from mlx_lm.utils import load_model, quantize_model, save_config, save_model

from families import FAMILIES, TOKENS

mx.set_default_device(mx.cpu)
# mxfp4 has no float parameters to upcast: its embeddings would come out in bf16, and so would the first layer's rest
embed = nn.QuantizedEmbedding.__call__
nn.QuantizedEmbedding.__call__ = lambda self, x: embed(self, x).astype(mx.float32)
KINDS = {"mlx-affine4": (32, 4, "affine"), "mlx-mxfp4": (32, 4, "mxfp4")}


def load(folder, config="config_v4.json"):
    with tempfile.TemporaryDirectory() as temporary:
        temporary = Path(temporary)
        config = json.loads((folder / config).read_text())
        if config.get("moe_layers"):  # as published: llama4_text's mixture of experts lies inside llama4
            config = {"model_type": "llama4", "text_config": config | {"rope_scaling": None}, "torch_dtype": "bfloat16"}
            weights = {f"language_model.{k}": v for k, v in mx.load(str(folder / "model.safetensors")).items()}
            mx.save_safetensors(str(temporary / "model.safetensors"), weights)
        elif config["model_type"].endswith("_text") and config["model_type"].startswith("qwen3_5"):  # inside qwen3_5
            model_type = config["model_type"].removesuffix("_text")
            config = {"model_type": model_type, "text_config": config, "torch_dtype": "bfloat16"}
            os.symlink(folder / "model.safetensors", temporary / "model.safetensors")
        elif config["model_type"] == "gpt_oss":  # whose dense experts mlx-lm does not bring into its own order
            weights = dict(mx.load(str(folder / "model.safetensors")))
            for name in [name for name in weights if ".mlp.experts." in name]:
                value, module = weights.pop(name), name.removesuffix("_bias")
                part, value = ("weight", value.swapaxes(1, 2)) if module == name else ("bias", value)
                for first, of in enumerate(("gate_proj", "up_proj") if "gate_up_proj" in module else ()):
                    weights[f"{module.replace('gate_up_proj', of)}.{part}"] = mx.contiguous(value[:, first::2])
                if module.endswith("down_proj"):
                    weights[f"{module}.{part}"] = mx.contiguous(value)
            mx.save_safetensors(str(temporary / "model.safetensors"), weights)
        else:
            os.symlink(folder / "model.safetensors", temporary / "model.safetensors")
        (temporary / "config.json").write_text(json.dumps(config))
        return load_model(temporary)


def to_f32(model):
    upcast = lambda v: v.astype(mx.float32) if mx.issubdtype(v.dtype, mx.floating) else v  # noqa: E731
    model.update(tree_map(upcast, model.parameters()))


def logits_of(model):
    to_f32(model)
    logits = model(mx.array([TOKENS]))[0].astype(mx.float32)
    mx.eval(logits)
    return logits


def difference(a, b):
    return (mx.max(mx.abs(a - b)) / mx.std(b)).item()


def dequantized(model):
    """All weights of the (f32) model, dequantized."""
    weights = dict(tree_flatten(model.parameters()))
    for path, module in model.named_modules():
        if hasattr(module, "bits"):
            weights[f"{path}.weight"] = mx.dequantize(
                module.weight, module.scales, module.get("biases"), module.group_size, module.bits, module.mode
            ).astype(mx.float32)
            for part in ("scales", "biases"):
                weights.pop(f"{path}.{part}", None)
    return weights


def to_hf(weights, config):
    """The inverse of the models' sanitize: mlx-lm's names and layouts to those of the Hugging Face checkpoints."""
    out = {}
    has_delta_rule = config["model_type"].startswith(("qwen3_next", "qwen3_5"))
    if "text_config" in config:
        weights = {name.removeprefix("language_model."): value for name, value in weights.items()}
    for name, value in weights.items():
        if config["model_type"] == "mixtral" and ".switch_mlp." in name:
            for ours, theirs in [("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")]:
                if ours in name:
                    for expert in range(value.shape[0]):
                        out[name.replace(f"switch_mlp.{ours}", f"experts.{expert}.{theirs}")] = value[expert]
        elif config["model_type"] == "gpt_oss" and "mlp.experts." in name:
            is_bias = name.endswith(".bias")
            suffix = "_bias" if is_bias else ""
            if "gate_proj" in name:  # rows alternate
                value = mx.stack([value, weights[name.replace("gate_proj", "up_proj")]], axis=2)
                value = value.reshape(value.shape[0], -1, *value.shape[3:])
                name = name.replace("gate_proj", "gate_up_proj")
            elif "up_proj" in name:
                continue
            out[name.rsplit(".", 1)[0] + suffix] = value if is_bias else value.swapaxes(1, 2)
        elif "block_sparse_moe.switch_mlp" in name:  # granitemoe
            if "gate_proj" in name:
                value = mx.concatenate([value, weights[name.replace("gate_proj", "up_proj")]], axis=1)
                out[name.replace("switch_mlp.gate_proj", "input_linear")] = value
            elif "down_proj" in name:
                out[name.replace("switch_mlp.down_proj", "output_linear")] = value
        elif ".switch_mlp." in name and config["model_type"] == "qwen3_5_moe":
            if "gate_proj" in name:
                value = mx.concatenate([value, weights[name.replace("gate_proj", "up_proj")]], axis=1)
                out[name.replace("switch_mlp.gate_proj.weight", "experts.gate_up_proj")] = value
            elif "down_proj" in name:
                out[name.replace("switch_mlp.down_proj.weight", "experts.down_proj")] = value
        elif ".switch_mlp." in name:
            for expert in range(value.shape[0]):
                out[name.replace("switch_mlp", f"experts.{expert}")] = value[expert]
        elif "feed_forward.experts" in name:  # llama4
            if "gate_proj" in name:
                value = mx.concatenate([value, weights[name.replace("gate_proj", "up_proj")]], axis=1)
                out[name.replace("gate_proj.weight", "gate_up_proj")] = value.swapaxes(1, 2)
            elif "down_proj" in name:
                out[name.removesuffix(".weight")] = value.swapaxes(1, 2)
        elif name.endswith("embed_q.weight"):  # deepseek_v3
            rest = weights[name.replace("embed_q", "unembed_out")]
            value = mx.concatenate([value.swapaxes(-1, -2), rest], axis=1)
            out[name.replace("embed_q", "kv_b_proj")] = value.reshape(-1, value.shape[-1])
        elif name.endswith("unembed_out.weight"):
            pass
        elif has_delta_rule and "conv1d" in name:
            out[name] = value.moveaxis(2, 1)
        elif has_delta_rule and "norm" in name and "linear_attn" not in name:
            out[name] = value - 1.0
        elif config["model_type"] == "apertus" and name.endswith(("alpha_p", "alpha_n")):
            out[name] = value.reshape(1)
        else:
            out[name] = value
    return out


def complete(weights, published, where):
    """Adds what mlx-lm's sanitize dropped, and checks names and shapes."""
    for name, value in published.items():
        if name not in weights and "e_score_correction_bias" in name:
            weights[name] = mx.zeros(value.shape)
    assert {k: v.shape for k, v in weights.items()} == {k: v.shape for k, v in published.items()}, (
        where, set(weights) ^ set(published),
    )
    return weights


def update_report(out, name, kind, entry):
    path = out / "report.json"
    report = json.loads(path.read_text()) if path.exists() else {}
    report.setdefault(name, {}).setdefault(kind, {}).update(entry)
    path.write_text(json.dumps(report, indent=1) + "\n")


def main(out, name):
    folder = out / name
    published = mx.load(str(folder / "hf" / "model.safetensors"))
    expected = mx.load(str(folder / "hf" / "refs.safetensors"))["logits_f32"]
    try:
        model, config = load(folder / "hf")
    except (Exception, SystemExit) as error:
        what = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        update_report(out, name, "hf", {"mlx_lm_dense": f"does not load: {what}"})
        raise SystemExit(f"does not load: {what}")
    dense = difference(logits_of(model), expected)
    exact = complete(to_hf(dict(tree_flatten(model.parameters())), config), dict(published), name)
    lost = [k for k, v in exact.items() if not mx.array_equal(v, published[k].astype(mx.float32))]
    try:
        v5 = difference(logits_of(load(folder / "hf", "config.json")[0]), expected)
    except Exception as error:
        v5 = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    update_report(out, name, "hf", {
        "mlx_lm_dense_difference_in_std": dense,
        "mlx_lm_with_transformers5_config": v5,
        "mlx_lm_changes_or_drops": lost,
    })
    for kind, (group_size, bits, mode) in KINDS.items():
        model, config = load(folder / "hf")
        dtype = getattr(mx, config["torch_dtype"])
        cast = getattr(model, "cast_predicate", lambda _: True)
        model.update(tree_map_with_path(
            lambda k, v: v.astype(dtype) if cast(k) and mx.issubdtype(v.dtype, mx.floating) else v, model.parameters()
        ))
        model, config = quantize_model(model, config, group_size, bits, mode=mode)
        target = folder / kind
        shutil.rmtree(target, ignore_errors=True)
        save_model(target, model)
        save_config(config, target / "config.json")
        (target / "model.safetensors.index.json").unlink()
        model, config = load_model(target)
        try:
            logits = logits_of(model)
        except Exception as error:  # families_transformers.py --dequantized will compute them
            logits = mx.full(expected.shape, mx.nan)
            update_report(out, name, kind, {"mlx_lm_error": str(error)[:200]})
        refs = {"tokens": mx.array(TOKENS, dtype=mx.int32), "logits_f32": logits}
        mx.save_safetensors(str(target / "refs.safetensors"), refs)
        temporary = out / "tmp" / name / kind
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        weights = complete(to_hf(dequantized(model), config), published, name)
        mx.save_safetensors(str(temporary / "model.safetensors"), weights, metadata={"format": "pt"})
        shutil.copy(folder / "hf" / "config.json", temporary / "config.json")
        mx.save_safetensors(str(temporary / "mlx_logits.safetensors"), {"logits_f32": logits})
    print(f"{name}: dense difference {dense:.2e}, with transformers 5's config {v5}, lost {lost}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("families", nargs="*")
    args = parser.parse_args()
    failed = []
    for family in args.families or FAMILIES:
        try:
            main(args.out.resolve(), family)
        except (Exception, SystemExit) as error:
            failed.append(family)
            print(f"{family}: {type(error).__name__}: {str(error)[:400]}", flush=True)
            if args.families and not isinstance(error, SystemExit):
                raise
    sys.exit(f"failed: {failed}" if failed else 0)
