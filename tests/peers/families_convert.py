#!/usr/bin/env python3
"""Compares `candle-quant convert --recipe uniform` with mlx-lm's own quantization, for every family of models.

  pip install 'mlx[cpu]==0.32' 'mlx-lm==0.32.2'
  python families_convert.py target/release/candle-quant tests/fixtures/families [FAMILY...]

Each FAMILY/hf, whose config.json is that of transformers 5, is converted to 4 bits in groups of 32 and to mxfp4. What comes
out is loaded by mlx-lm, strictly, and compared with FAMILY/mlx-affine4 and FAMILY/mlx-mxfp4, which mlx-lm wrote: names,
dtypes, shapes, bytes, and logits.
"""
import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.utils import load_model

mx.set_default_device(mx.cpu)
FORMATS = {"mlx-affine4": "affine:4:g32", "mlx-mxfp4": "mxfp4"}
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


def problems(binary, folder, kind):
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary, "out")
        command = [binary, "convert", folder / "hf", "-o", out, "-q", "--format", FORMATS[kind], "--recipe", "uniform", "--strict"]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            return [f"convert: {run.stderr.strip()}"]
        found, expected = tensors(out), tensors(folder / kind)
        of_type = [json.loads((side / "config.json").read_text())["model_type"] for side in (out, folder / kind)]
        if of_type[0] == of_type[1] + "_text":  # the text of a larger model, without which mlx-lm has none
            expected = {name.removeprefix("language_model."): value for name, value in expected.items()}
        found = {name: value for name, value in found.items() if name in expected or not name.endswith(KEPT)}
        wrong = []
        for what, names in (("only ours", set(found) - set(expected)), ("only mlx-lm's", set(expected) - set(found))):
            if names:
                wrong.append(f"{what}: {len(names)}, {sorted(names)[0]}")
        differ = [name for name in sorted(set(found) & set(expected)) if found[name] != expected[name]]
        if differ:
            forms = [side[differ[0]][:2] for side in (found, expected)]
            wrong.append(f"differ: {len(differ)}, {differ[0]} {forms}")
        if of_type[0] != of_type[1]:
            return wrong
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


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("binary", type=Path, help="candle-quant")
parser.add_argument("fixtures", type=Path)
parser.add_argument("families", nargs="*")
args = parser.parse_args()
families = args.families or sorted(path.parent.name for path in args.fixtures.glob("*/mlx-affine4"))
failed = 0
for family in families:
    for kind in FORMATS:
        wrong = problems(args.binary.resolve(), args.fixtures / family, kind)
        failed += bool(wrong)
        print(f"{family} {kind}: {'; '.join(wrong) or 'equal'}", flush=True)
print(f"{len(families)} families, {failed} outputs wrong")
sys.exit(failed > 0)
