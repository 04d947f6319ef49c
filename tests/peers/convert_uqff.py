#!/usr/bin/env python3
"""Loads what `candle-quant convert --to uqff` writes in mistral.rs, and runs it.

  pip install mistralrs==0.9.5
  python convert_uqff.py target/release/candle-quant SOURCE [SOURCE..] [--write]

A SOURCE is a dense checkpoint with a tokenizer that has a chat template (Qwen3, Qwen2, Llama, Qwen3-MoE). For every type
it is converted, loaded by mistral.rs on a CPU in F32 and asked for a few tokens. The same is done with the numbers that
the output stands for (`--dequantize`), which mistral.rs loads as a dense model: the log probabilities have to be nearly
equal; mistral.rs brings AFQ weights to the dtype of their scales, BF16, before it multiplies. Models that have biases
beside packed weights, or layers that are not packed, are run in BF16: in F32 mistral.rs does not load its own files of
them. Then MLX output is brought to UQFF without requantizing, and loaded, too.

--write: mistral.rs also writes the type itself, and entries and bytes are compared (afq4, afq6, afq8; of mxfp4 only the
entries, as its quantizer saturates). Stacks of experts in AFQ are not run: mistral.rs 0.9.5 can't on a CPU.
"""
import argparse
import json
import subprocess
import tempfile
from pathlib import Path

from mistralrs import Architecture, ChatCompletionRequest, ModelDType, Runner, Which

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("binary", type=Path, help="candle-quant")
parser.add_argument("sources", type=Path, nargs="+", help="dense checkpoints with a tokenizer")
parser.add_argument("--write", action="store_true", help="compare with what mistral.rs writes")
args = parser.parse_args()

ARCHITECTURES = dict(qwen3="Qwen3", qwen2="Qwen2", llama="Llama", qwen3_moe="Qwen3Moe")
TYPES = {"afq2": "2", "afq3": "3", "afq4": "4", "afq6": "6", "afq8": "8", "mxfp4": "mxfp4"}
SAME = ("afq4", "afq6", "afq8")


def convert(source, out, *options):
    subprocess.run([args.binary, "convert", source, "-o", out, "-q", *options], check=True)
    return out


def run(folder, arch, dtype, **how):
    how |= dict(arch=getattr(Architecture, arch), dtype=getattr(ModelDType, dtype))
    which = Which.Plain(model_id=str(folder), **how)
    runner = Runner(which=which, max_seqs=1, no_paged_attn=True)
    messages = [{"role": "user", "content": "hello world this is"}]
    request = ChatCompletionRequest(
        model="default", messages=messages, max_tokens=8, temperature=0.0, logprobs=True, top_logprobs=1
    )
    tokens = runner.send_chat_completion_request(request).choices[0].logprobs.content
    return [token.token for token in tokens], [token.logprob for token in tokens]


def check(name, folder, arch, dtype, scratch):
    shards = sorted(file.name for file in folder.glob("*-0.uqff"))
    assert len(shards) == 1, shards
    tokens, found = run(folder, arch, dtype, from_uqff=shards[0])
    dense = convert(folder, Path(scratch, "dense"), "--dequantize", "--dtype", dtype.lower(), "--overwrite")
    expected_tokens, expected = run(dense, arch, dtype)
    far = max(abs(a - b) for a, b in zip(found, expected))
    print(f"{name}: loads and runs, log probabilities off by {far:.5f} at most, tokens {tokens == expected_tokens}", flush=True)
    assert far < 0.05, (found, expected)


def entries(file):
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__")
    return list(header.items()), data[8 + length :]


for source in args.sources:
    config = json.loads((source / "config.json").read_text())
    arch, k = ARCHITECTURES[config["model_type"]], config["hidden_size"]
    dtype = "BF16" if arch == "Qwen2" or k % 128 else "F32"
    with tempfile.TemporaryDirectory() as scratch:
        for name, spec in TYPES.items():
            out = convert(source, Path(scratch, name), "--to", "uqff", "--format", spec)
            what = f"{source.name} {name}"
            if arch == "Qwen3Moe":
                print(f"{what}: written")
            else:
                check(what, out, arch, dtype, scratch)
            if args.write and name in (*SAME, "mxfp4") and not (name == "mxfp4" and (arch == "Qwen3Moe" or k % 32)):
                theirs = Path(scratch, f"{name}-theirs")
                which = Which.Plain(
                    model_id=str(source),
                    arch=getattr(Architecture, arch),
                    write_uqff=str(theirs / f"{name}.uqff"),
                    dtype=ModelDType.BF16,
                )
                Runner(which=which, in_situ_quant=name, max_seqs=1, no_paged_attn=True)
                for file in (f"{name}-0.uqff", "residual.safetensors"):
                    ours, expected = entries(out / file), entries(theirs / file)
                    assert ours[0] == expected[0], (what, file)
                    assert ours[1] == expected[1] or (name, file) == ("mxfp4", "mxfp4-0.uqff"), (what, file)
                print(f"{what}: as mistral.rs writes it")
        if arch != "Qwen3Moe":
            for spec in ("4:g32", "8:g128", "mxfp4"):
                mlx = convert(source, Path(scratch, f"mlx{spec}".replace(":", "")), "--recipe", "uniform", "--format", spec)
                out = convert(mlx, Path(scratch, f"repacked{spec}".replace(":", "")), "--to", "uqff", "--format", "keep")
                check(f"{source.name} MLX {spec} -> UQFF", out, arch, dtype, scratch)
