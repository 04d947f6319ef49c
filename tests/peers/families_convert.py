#!/usr/bin/env python3
"""Compares `candle-quant convert --recipe uniform` with mlx-lm's own quantization, for every family of models.

  pip install 'mlx[cpu]==0.32' 'mlx-lm==0.32.2'
  python families_convert.py target/release/candle-quant tests/fixtures/families [--source hf|published|gguf|uqff] [FAMILY...]

hf: each FAMILY/hf, whose config.json is that of transformers 5, is converted to 4 bits in groups of 32 and to mxfp4. What comes
out is loaded by mlx-lm, strictly, and compared with FAMILY/mlx-affine4 and FAMILY/mlx-mxfp4, which mlx-lm wrote: type, names,
dtypes, shapes, bytes, and logits. It is asked for with --strict, which has to fail of models of which mlx-lm leaves matrices
dense whose rows are no whole groups, and has to name one of these. published: the same with config_v4.json.

gguf, uqff: the files of the family are converted to F32, 4 bits, mxfp4, and 8 bits. mlx-lm has to load what comes out, strictly,
and to compute, in F32, of F32 the logits of transformers, or its own of FAMILY/hf where report.json says that they are others;
of packed weights those of `candle-quant logits`, or its own of the same numbers.
"""
import argparse
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.utils import load_model

import families_mlx
from families import config_of_gguf

FORMATS = {"mlx-affine4": "affine:4:g32", "mlx-mxfp4": "mxfp4"}
GROUP_SIZE = 32
TOLERANCE = 3e-4
# What mlx-lm has no model of, and why.
NONE = {
    ("olmo", "gguf"): "its OLMo is that of the package ai2-olmo",
    ("llama4_text-dense", "uqff"): "its Llama 4 of more than text has experts, and a head",
}
# mlx-lm drops these when it loads them, and so does its quantization; other programs need them.
KEPT = ("e_score_correction_bias",)


def tensors(folder):
    data = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    parts = lambda info: data[8 + length + info["data_offsets"][0] : 8 + length + info["data_offsets"][1]]  # noqa: E731
    return {name: (info["dtype"], info["shape"], parts(info)) for name, info in header.items()}


def logits(folder, tokens):
    model, _ = load_model(folder)
    upcast = lambda v: v.astype(mx.float32) if mx.issubdtype(v.dtype, mx.floating) else v  # noqa: E731
    model.update(tree_map(upcast, model.parameters()))
    result = model(tokens[None])[0].astype(mx.float32)
    mx.eval(result)
    return result


def convert(binary, source, out, form, *options):
    command = [binary, "convert", source, "-o", out, "-q", "--format", form, "--recipe", "uniform", *options]
    run = subprocess.run(command, capture_output=True, text=True)
    return run.stderr.strip() if run.returncode else None


def narrow(found):
    """Matrices of modules that are dense since their rows are no whole groups."""
    weights = (name for name in found if name.endswith(".weight") and f"{name.removesuffix('weight')}scales" not in found)
    is_one = lambda shape: len(shape) > 1 and shape[-1] % GROUP_SIZE  # noqa: E731
    return [name for name in weights if is_one(found[name][1]) and not ("conv1d" in name or "norm" in name)]


def of_published(binary, folder, kind, temporary):
    """What is wrong with the conversion of a published model."""
    out, expected = temporary / "out", tensors(folder / kind)
    error, dense = convert(binary, folder / "hf", out, FORMATS[kind], "--strict"), narrow(expected)
    if dense:
        if error is None or not any(name in error for name in dense):
            return [f"--strict does not refuse {dense[0]}: {error}"]
        error = convert(binary, folder / "hf", out, FORMATS[kind])
    if error:
        return [f"convert: {error}"]
    found, wrong = tensors(out), []
    ours, theirs = (json.loads((side / "config.json").read_text())["model_type"] for side in (out, folder / kind))
    if ours != theirs:
        wrong.append(f"type {ours} instead of {theirs}")
    found = {name: value for name, value in found.items() if name in expected or not name.endswith(KEPT)}
    for what, names in (("only ours", set(found) - set(expected)), ("only mlx-lm's", set(expected) - set(found))):
        if names:
            wrong.append(f"{what}: {len(names)}, {sorted(names)[0]}")
    differ = [name for name in sorted(set(found) & set(expected)) if found[name] != expected[name]]
    if differ:
        forms = [side[differ[0]][:2] for side in (found, expected)]
        wrong.append(f"differ: {len(differ)}, {differ[0]} {forms}")
    tokens = mx.array(list(range(1, 25)))
    try:
        theirs = logits(folder / kind, tokens)
    except Exception as error:
        theirs = error
    try:
        ours = logits(out, tokens)
        if isinstance(theirs, Exception):
            wrong.append(f"mlx-lm does not run its own: {theirs}")
        elif not mx.array_equal(ours, theirs):
            wrong.append(f"logits differ by {(mx.max(mx.abs(ours - theirs)) / mx.std(theirs)).item():.2e} std")
    except Exception as error:
        if str(error) != str(theirs):
            wrong.append(f"mlx-lm: {type(error).__name__}: {str(error)[:200]}")
    return wrong


def of_published_config(binary, folder, kind, temporary):
    (temporary / "hf").mkdir()
    os.symlink((folder / "hf/model.safetensors").resolve(), temporary / "hf/model.safetensors")
    shutil.copy(folder / "hf/config_v4.json", temporary / "hf/config.json")
    os.symlink((folder / kind).resolve(), temporary / kind)
    return of_published(binary, temporary, kind, temporary)


def own_logits(binary, container, folder, source, temporary):
    """mlx-lm's own of the published model with the config that the GGUF file has, or of that of which UQFF files have the numbers."""
    own = temporary / "own"
    if container == "gguf":
        own.mkdir()
        os.symlink((folder / "hf/model.safetensors").resolve(), own / "model.safetensors")
        (own / "config.json").write_text(json.dumps(config_of_gguf(folder)))
    else:
        command = [binary, "convert", source, "-o", own, "-q", "--to", "hf", "--dequantize", "--dtype", "f32"]
        subprocess.run(command, check=True)
    return families_mlx.logits_of(families_mlx.load(own, "config.json")[0])


def of_file(container, binary, folder, form, temporary):
    """What is wrong with the conversion of a GGUF file, or of UQFF files."""
    out, computed, dense = temporary / "out", temporary / "logits.safetensors", temporary / "dense"
    source = folder / container / ("model.gguf" if container == "gguf" else "")
    if error := convert(binary, source, out, form, "--requantize"):
        return [f"convert: {error}"]
    refs = folder / container / "refs.safetensors"
    refs = mx.load(str(refs if refs.exists() else folder / "hf/refs.safetensors"))
    is_other = REPORT[folder.name]["hf"]["mlx_lm_dense_difference_in_std"] > TOLERANCE
    if form == "f32":
        expected = own_logits(binary, container, folder, source, temporary) if is_other else refs["logits_f32"]
    elif is_other:
        command = [binary, "convert", out, "-o", dense, "-q", "--dequantize", "--dtype", "f32"]
        subprocess.run(command, check=True)
        expected = logits(dense, refs["tokens"])
    else:
        tokens = ",".join(map(str, refs["tokens"].tolist()))
        run = subprocess.run([binary, "logits", out, "--tokens", tokens, "--out", computed], capture_output=True, text=True)
        if run.returncode:
            return [f"logits: {run.stderr.strip()}"]
        expected = mx.load(str(computed))["logits"]
    try:
        found = logits(out, refs["tokens"])
    except Exception as error:
        return [f"mlx-lm: {type(error).__name__}: {str(error)[:300]}"]
    far = (mx.max(mx.abs(found - expected)) / mx.std(expected)).item()
    if not far <= TOLERANCE or not mx.array_equal(mx.argmax(found, 1), mx.argmax(expected, 1)):
        return [f"logits differ by {far:.2e} std"]
    return []


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("binary", type=Path, help="candle-quant")
parser.add_argument("fixtures", type=Path)
parser.add_argument("families", nargs="*")
parser.add_argument("--source", choices=["hf", "published", "gguf", "uqff"], help="only conversions of these")
args = parser.parse_args()
REPORT = json.loads((args.fixtures / "report.json").read_text())
FILES = ["f32", *FORMATS.values(), "affine:8:g32"]
runs = {
    "hf": ("mlx-affine4", list(FORMATS), of_published),
    "published": ("mlx-affine4", list(FORMATS), of_published_config),
    "gguf": ("gguf", FILES, functools.partial(of_file, "gguf")),
    "uqff": ("uqff", FILES, functools.partial(of_file, "uqff")),
}
count, failed = 0, 0
for source in [args.source] if args.source else runs:
    has, kinds, check = runs[source]
    families = sorted(path.parent.name for path in args.fixtures.glob(f"*/{has}"))
    for family in [family for family in families if family in args.families or not args.families]:
        if (family, source) in NONE:
            print(f"{family} {source}: no model of mlx-lm: {NONE[family, source]}")
            continue
        for kind in kinds:
            with tempfile.TemporaryDirectory() as temporary:
                wrong = check(args.binary.resolve(), args.fixtures / family, kind, Path(temporary))
            count, failed = count + 1, failed + bool(wrong)
            print(f"{family} {source} {kind}: {'; '.join(wrong) or 'equal'}", flush=True)
print(f"{count} outputs, {failed} wrong")
sys.exit(failed > 0)
