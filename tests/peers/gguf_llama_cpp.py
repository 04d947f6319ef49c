#!/usr/bin/env python3
"""Runs in llama.cpp what `candle-quant convert --to gguf` writes.

  pip install xllamacpp==2026.10.11549
  python gguf_llama_cpp.py target/release/candle-quant SOURCE [--requantize] [TYPE..]

SOURCE is a checkpoint with a tokenizer. For every type it is converted, and llama.cpp draws a text greedily; so it does with the
numbers that the file stands for (`--dequantize --dtype f32`). Log probabilities may differ by what llama.cpp's rounding of
activations to 8 bits does; texts, ours among them, may part where two tokens are nearly as likely. Two of them have to agree.
"""
import argparse
import os
import subprocess
import tempfile
from pathlib import Path

import xllamacpp

TYPES = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "mxfp4", "nvfp4")
PROMPT, TOKENS = "Once upon a time", 48

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("binary", type=Path, help="candle-quant")
parser.add_argument("source", type=Path)
parser.add_argument("types", nargs="*", default=TYPES, help="or `keep`: as it is")
parser.add_argument("--requantize", action="store_true")
parser.add_argument("--prompt", default=PROMPT)
args = parser.parse_args()


def convert(source, out, *options):
    command = [args.binary, "convert", source, "-o", out, "-q", "--to", "gguf", *options]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return out


def run(folder):
    params = xllamacpp.CommonParams()
    params.model.path = str(Path(folder, "model.gguf"))
    params.n_ctx, params.n_parallel, params.warmup, params.n_gpu_layers = 256, 1, False, 0
    params.cpuparams.n_threads = os.cpu_count()
    params.verbosity = -1
    request = dict(prompt=args.prompt, max_tokens=TOKENS, temperature=0, logprobs=1, cache_prompt=False)
    choice = xllamacpp.Server(params).handle_completions(request)["choices"][0]
    tokens = choice["logprobs"]["content"]
    return choice["text"], [token["id"] for token in tokens], [token["logprob"] for token in tokens]


def ours(folder):
    command = [args.binary, "generate", folder, "--prompt", args.prompt, "-n", str(TOKENS), "--temperature", "0", "--cpu"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return text.removeprefix(args.prompt).removesuffix("\n")


failed = []
for kind in args.types:
    with tempfile.TemporaryDirectory() as scratch:
        further = ["--requantize"] if args.requantize else []
        packed = convert(args.source, Path(scratch, "packed"), "--format", kind, *further)
        dense = convert(packed, Path(scratch, "dense"), "--dequantize", "--dtype", "f32")
        text, ids, found = run(packed)
        exact, exact_ids, expected = run(dense)
        mine = ours(packed)
    same = next((i for i, (a, b) in enumerate(zip(ids, exact_ids)) if a != b), min(len(ids), len(exact_ids)))
    far = max((abs(a - b) for a, b in zip(found[:same], expected)), default=float("inf"))
    common = len(os.path.commonprefix([mine, exact]))
    print(
        f"{kind}: {same} of {len(exact_ids)} tokens those of the dense file, log probabilities {far:.4f} apart; ours has "
        f"{common} of {len(exact)} characters of the dense file's text, "
        f"{len(os.path.commonprefix([mine, text]))} of the packed one's"
    )
    if mine not in (exact, text) and exact != text:
        failed.append(kind)
print("failed: " + ", ".join(failed) if failed else "all agree")
raise SystemExit(bool(failed))
