#!/usr/bin/env python3
"""Compares `candle-quant convert` with `mlx_lm.convert`, byte for byte, and runs what it writes in mlx-lm.

  pip install 'mlx[cpu]==0.32.4' 'mlx-lm==0.32.2'
  python convert_mlx.py target/release/candle-quant assets/tiny-bf16 [--digests tests/fixtures/convert/mlx_lm.json]

For every case the same source is converted by both, and packed words, scales, biases and dense tensors are compared
(names, dtypes, shapes, bytes). Cases: affine with 2, 3, 4, 5, 6 and 8 bits and groups of 32, 64 and 128, mxfp4,
mxfp8, nvfp4, the mixed recipes, float16 and float32 first; and a small model with experts (Qwen3-MoE), which is made
here. Our output is then loaded and run by mlx-lm, with the logits of its own output expected. What the safe defaults
write, which mlx-lm has not, is only loaded and run.

--digests writes what the tests of the crate compare with: for every case the tensors of mlx-lm's output in the order
of their names, each as the first 16 digits of the SHA-256 of `name dtype [shape]\n` and its bytes.
"""
import argparse
import hashlib
import json
import subprocess
import tempfile
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm import convert as mlx_convert
from mlx_lm import load
from mlx_lm.models import qwen3_moe

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("binary", type=Path, help="candle-quant")
parser.add_argument("source", type=Path, help="dense checkpoint with a tokenizer")
parser.add_argument("--digests", type=Path, help="JSON file to write")
args = parser.parse_args()
mx.set_default_device(mx.cpu)

AFFINE = [(bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
CASES = {f"affine-{b}-g{g}": (["--bits", str(b), "--group-size", str(g)], dict(q_bits=b, q_group_size=g)) for b, g in AFFINE}
CASES |= {mode: (["--format", mode], dict(q_mode=mode)) for mode in ("mxfp4", "mxfp8", "nvfp4")}
for dtype in ("float16", "float32"):
    ours = ["--format", "4", "--dtype", dtype.replace("float", "f")]
    CASES[f"affine-4-g64-{dtype}"] = (ours, dict(q_bits=4, q_group_size=64, dtype=dtype))
MIXED = ["mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6"]


def ours(source, out, *options):
    subprocess.run([args.binary, "convert", source, "-o", out, "-q", *options], check=True)


def tensors(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found = {}
    for file in sorted(set(index.values())):
        data = (folder / file).read_bytes()
        length = int.from_bytes(data[:8], "little")
        for name, info in json.loads(data[8 : 8 + length]).items():
            if name != "__metadata__":
                begin, end = (8 + length + offset for offset in info["data_offsets"])
                found[name] = (info["dtype"], tuple(info["shape"]), data[begin:end])
    assert sorted(found) == sorted(index)
    return found


def logits(folder):
    model, _ = load(str(folder))
    # Dense experts are computed in f32 only, on a CPU.
    upcast = lambda v: v.astype(mx.float32) if mx.issubdtype(v.dtype, mx.floating) else v
    model.update(tree_map(upcast, model.parameters()))
    result = model(mx.array([list(range(1, 25))]))[0].astype(mx.float32)
    assert mx.all(mx.isfinite(result)), folder
    return result


def compare(name, source, ours_options, theirs_options):
    with tempfile.TemporaryDirectory() as temporary:
        mine, theirs = Path(temporary, "ours"), Path(temporary, "theirs")
        ours(source, mine, *ours_options)
        mlx_convert(str(source), mlx_path=str(theirs), quantize=True, **theirs_options)
        a, b = tensors(mine), tensors(theirs)
        assert sorted(a) == sorted(b), (name, sorted(set(a) ^ set(b))[:4])
        for tensor in a:
            assert a[tensor][:2] == b[tensor][:2], (name, tensor, a[tensor][:2], b[tensor][:2])
            assert a[tensor][2] == b[tensor][2], (name, tensor)
        assert mx.array_equal(logits(mine), logits(theirs)), name
        packed = sum(dtype == "U32" for dtype, _, _ in a.values())
        print(f"{name}: {len(a)} tensors equal, {packed} of them packed words; logits equal", flush=True)
        head = lambda tensor, dtype, shape: f"{tensor} {dtype} {list(shape)}\n".encode()
        digest = lambda tensor, dtype, shape, data: hashlib.sha256(head(tensor, dtype, shape) + data).hexdigest()[:16]
        return [digest(tensor, *b[tensor]) for tensor in sorted(b)]


def experts(folder, source):
    """A dense Qwen3-MoE of random weights, with experts of their own names as Hugging Face has them."""
    config = json.loads((source / "config.json").read_text())
    config |= dict(
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    model = qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(config))
    mx.random.seed(7)
    weights = {}
    for name, value in tree_flatten(model.parameters()):
        value = value if "norm" in name else mx.random.normal(value.shape) * 0.05
        value = value.astype(mx.bfloat16)
        if ".switch_mlp." in name:
            for index in range(4):
                weights[name.replace("switch_mlp", f"experts.{index}")] = value[index]
        else:
            weights[name] = value
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    for file in source.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())


digests = {}
for name, (options, theirs) in CASES.items():
    digests[name] = compare(name, args.source, ["--recipe", "uniform", *options], theirs)
for recipe in MIXED:
    theirs = dict(quant_predicate=recipe, q_group_size=64)
    digests[recipe] = compare(recipe, args.source, ["--recipe", recipe], theirs)
with tempfile.TemporaryDirectory() as temporary:
    moe = Path(temporary, "moe")
    experts(moe, args.source)
    router = ["--role", "router=affine:8:g64"]  # the rule that mlx-lm has for this architecture
    for name in ("affine-4-g64", "affine-3-g32", "mxfp4", "nvfp4"):
        options, theirs = CASES[name]
        compare(f"experts {name}", moe, ["--recipe", "uniform", *router, *options], theirs)
    for source, what in ((args.source, "dense"), (moe, "experts")):
        for options in (["--bits", "4"], ["--format", "mxfp4"], ["--format", "nvfp4"], ["--format", "6:g32", "--max-shard-size", "300KB"]):
            out = Path(temporary, what + "".join(options))
            ours(source, out, *options)
            difference = mx.sqrt(mx.mean(mx.square(logits(out) - logits(source)))) / mx.std(logits(source))
            print(f"{what}, safe defaults, {' '.join(options)}: runs, logits off by {difference.item():.4f} of their deviation")
        # What is packed already, written again: equal tensors.
        again = Path(temporary, what + "again")
        ours(out, again, "--format", "8")
        assert tensors(out) == tensors(again)
        print(f"{what}, packed already: equal")
if args.digests:
    lines = [f'"{name}": {json.dumps(case, separators=(",", ":"))}' for name, case in digests.items()]
    args.digests.write_text("{" + ",\n".join(lines) + "}\n")
