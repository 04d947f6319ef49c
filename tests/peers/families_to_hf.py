#!/usr/bin/env python3
"""Loads what `candle-quant convert --to hf` writes with transformers, for every family of models and every container.

  pip install torch==2.15 transformers==5.23 safetensors compressed-tensors==0.20
  python families_to_hf.py target/release/candle-quant tests/fixtures/families [FAMILY...]

Each FAMILY/{hf,mlx-affine4,mlx-mxfp4,gguf,uqff} is written dense, in F32. transformers has to find every tensor that it looks for, and
no other, and to compute the logits that the fixtures have of the peers, within 3e-4 standard deviations.

FAMILY/hf is also packed in each of FORMATS. compressed-tensors has to decode the numbers that candle-quant decodes, bit for bit,
and transformers, which dequantizes what it loads, to compute candle-quant's logits; for these, scales are F32, since it rounds
products to the dtype of the scales. transformers 5.23 takes the exponents of experts in mxfp8 for factors: these are only decoded;
and it loads no experts of which only some projections are packed, which convert says. Experts of gpt-oss in mxfp4 are in
transformers' own form, which it decodes.
"""
import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

torch.set_num_threads(1)
TOLERANCE = 3e-4
FORMATS = ["affine:4:g32", "affine:8:g32", "mxfp4", "mxfp8", "nvfp4"]
# The parts of a packed weight.
PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_global_scale")
# A note of convert.
PARTLY = "of which only some projections are packed"
# mlx-lm drops it: there is none to write, and transformers begins with zeros.
LOST = "moe_statics.e_score_correction_bias"
# Larger models, of which not the text alone is in the file.
LARGER = {
    (name, "uqff") for name in ("llama4_text", "llama4_text-dense", "ministral3", "qwen3_5_moe_text", "qwen3_5_text")
}
# Not known to transformers 5: the repository of the model has code of its own.
UNKNOWN = {"internlm3": "internlm3"}


def convert(binary, source, out, *options, to=("--to", "hf")):
    command = [binary, "convert", source, "-o", out, "-q", *to, *options]
    run = subprocess.run(command, capture_output=True, text=True)
    return run.stderr.strip() if run.returncode else None


def load(folder, **options):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, **options
    )
    wrong = {key: sorted(map(str, value)) for key, value in info.items() if value}
    return model.float().eval(), wrong  # experts that were dequantized are BF16


def references(folder):
    refs = folder / "refs.safetensors"
    return load_file(refs if refs.exists() else folder.parent / "hf" / "refs.safetensors")


def distance(model, tokens, expected):
    with torch.no_grad():
        logits = model(tokens.long()[None], use_cache=False).logits[0].float()
    return ((logits - expected).abs().max() / expected.std()).item()


def problems(binary, folder):
    source = folder / "model.gguf" if (folder / "model.gguf").exists() else folder
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary, "out")
        if error := convert(binary, source, out, "--dequantize", "--dtype", "f32"):
            return f"convert: {error}"
        try:
            model, wrong = load(out)
            if folder.parent.name == "ernie4_5_moe" and folder.name.startswith("mlx"):
                missing = [name for name in wrong.pop("missing_keys", []) if not name.endswith(LOST)]
                wrong |= {"missing_keys": missing} if missing else {}
            refs = references(folder)
            far = distance(model, refs["tokens"], refs["logits_f32"])
        except Exception as error:  # noqa: BLE001
            return f"transformers: {type(error).__name__}: {str(error)[:300]}"
        if wrong:
            return str(wrong)[:400]
        return None if far <= TOLERANCE else f"logits differ by {far:.2e} std"


def decoded(folder):
    """What compressed-tensors, or transformers, makes of the packed weights, by module."""
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    if config["quant_method"] == "mxfp4":
        for name in sorted(name for name in tensors if name.endswith("_blocks")):
            module, projection = name.removesuffix("_blocks").rsplit(".", 1)
            scales = tensors[f"{module}.{projection}_scales"]
            # [E, K, N], in BF16, which holds these numbers
            weight = convert_moe_packed_tensors(tensors[name], scales).transpose(1, 2)
            if projection == "gate_up_proj":
                yield f"{module}.gate_proj", weight[:, ::2]
                yield f"{module}.up_proj", weight[:, 1::2]
            else:
                yield f"{module}.{projection}", weight
        return
    groups = list(QuantizationConfig.model_validate(config).config_groups.values())
    modules = {name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")}
    for module in sorted(modules):
        is_named = lambda target: target == module or target.startswith("re:") and re.match(target[3:], module)  # noqa: E731
        named = [group for group in groups if any(map(is_named, group.targets))]
        scheme = (named or [group for group in groups if "Linear" in group.targets])[0]
        state = {part: tensors[f"{module}.{part}"] for part in (*PARTS, "weight") if f"{module}.{part}" in tensors}
        if scheme.format == "pack-quantized":  # BF16, in which products of codes and scales would be rounded
            state["weight_scale"] = state["weight_scale"].float()
        yield module, BaseCompressor.get_value_from_registry(scheme.format).decompress(state, scheme)["weight"]


def packed_problems(binary, folder, form):
    with tempfile.TemporaryDirectory() as temporary:
        out, dense, logits = (Path(temporary, name) for name in ("out", "dense", "logits.safetensors"))
        command = [binary, "convert", folder, "-o", out, "--dry-run", "--to", "hf", "--format", form]
        partly = PARTLY in subprocess.run(command, capture_output=True, text=True).stdout
        if error := convert(binary, folder, out, "--format", form):
            return f"convert: {error}"
        if error := convert(binary, out, dense, "--dequantize", "--dtype", "f32", to=()):
            return f"convert back: {error}"
        ours = load_file(dense / "model.safetensors")
        count = 0
        try:
            weights = dict(decoded(out))
        except Exception as error:  # noqa: BLE001
            return f"compressed-tensors: {type(error).__name__}: {str(error)[:300]}"
        for module, weight in weights.items():
            count += 1
            if not torch.equal(weight.float(), ours[f"{module}.weight"]):
                far = (weight.float() - ours[f"{module}.weight"]).abs().max().item()
                return f"{module}: compressed-tensors decodes other numbers, by {far:.2e}"
        if not count:
            return "nothing is packed"
        if partly or form == "mxfp8" and any(".experts." in module for module in weights):
            return None
        if form.startswith("affine"):
            out = Path(temporary, "in-f32")
            if error := convert(binary, folder, out, "--format", form, "--dtype", "f32"):
                return f"convert: {error}"
        refs = references(folder)
        tokens = ",".join(map(str, refs["tokens"].tolist()))
        command = [binary, "logits", out, "--tokens", tokens, "--out", logits]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            return f"logits: {run.stderr.strip()}"
        try:
            is_mxfp4 = json.loads((out / "config.json").read_text())["quantization_config"]["quant_method"] == "mxfp4"
            config = transformers.Mxfp4Config(dequantize=True) if is_mxfp4 else transformers.CompressedTensorsConfig(dequantize=True)
            model, wrong = load(out, quantization_config=config)
            far = distance(model, refs["tokens"], load_file(logits)["logits"])
        except Exception as error:  # noqa: BLE001
            return f"transformers: {type(error).__name__}: {str(error)[:300]}"
        if wrong:
            return str(wrong)[:400]
        return None if far <= TOLERANCE else f"logits differ by {far:.2e} std"


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("binary", type=Path, help="candle-quant")
parser.add_argument("fixtures", type=Path)
parser.add_argument("families", nargs="*")
args = parser.parse_args()
transformers.utils.logging.set_verbosity_error()
names = args.families or sorted(path.parent.name for path in args.fixtures.glob("*/hf"))
count, failed = 0, 0
for name in names:
    if name in UNKNOWN:
        print(f"{name}: not known to transformers", flush=True)
        continue
    folders = (path for path in (args.fixtures / name).iterdir() if path.is_dir())
    for folder in sorted(path for path in folders if (name, path.name) not in LARGER):
        problem = problems(args.binary.resolve(), folder)
        count, failed = count + 1, failed + bool(problem)
        print(f"{name} {folder.name}: {problem or 'loads, with equal logits'}", flush=True)
    for form in FORMATS:
        problem = packed_problems(args.binary.resolve(), args.fixtures / name / "hf", form)
        count, failed = count + 1, failed + bool(problem)
        print(f"{name} {form}: {problem or 'decodes and computes alike'}", flush=True)
print(f"{count} outputs, {failed} wrong")
sys.exit(failed > 0)
