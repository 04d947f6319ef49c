#!/usr/bin/env python3
"""Loads what `candle-quant convert --to uqff` writes in mistral.rs, and runs it.

  pip install mistralrs==0.9.5
  python convert_uqff.py target/release/candle-quant SOURCE [SOURCE..] [--write]

A SOURCE is a dense checkpoint with a tokenizer that has a chat template (Qwen3, Qwen2, Llama, Qwen3-MoE). For every type
it is converted, loaded by mistral.rs on a CPU in F32 and asked for a few tokens. The same is done with the numbers that
the output stands for (`--dequantize`), which mistral.rs loads as a dense model: the log probabilities have to be nearly
equal; mistral.rs brings AFQ weights to the dtype of their scales, BF16, before it multiplies. Models that have biases
beside packed weights, or layers that are not packed, are run in the dtype in which mistral.rs loads its own files of them: BF16, or
F32 beside types of GGML, HQQ and F8Q8. Then MLX output is brought to UQFF without requantizing, and loaded, too.

--write: mistral.rs also writes the type itself, and entries and bytes are compared; of mxfp4 and the K types only the entries, as
its quantizers lose more. Stacks of experts are not run in AFQ, which mistral.rs 0.9.5 can't on a CPU, and are none of HQQ, FP8 and
F8Q8. Blocks of GGML's types are multiplied by candle in mistral.rs, which rounds activations to 8 bits. At last several types are
written in one run, and each of them is loaded from there.
"""
import argparse
import json
import os
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
PROMPT, TOKENS = "hello world this is", 8
BLOCKS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2k", "q3k", "q4k", "q5k", "q6k")
WHOLE = ("hqq4", "hqq8", "fp8", "f8q8")
TYPES |= {name: name for name in (*BLOCKS, *WHOLE)}
SAME = ("afq4", "afq6", "afq8", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", *WHOLE)


def convert(source, out, *options):
    subprocess.run([args.binary, "convert", source, "-o", out, "-q", *options], check=True)
    return out


def run(folder, arch, dtype, **how):
    how |= dict(arch=getattr(Architecture, arch), dtype=getattr(ModelDType, dtype))
    which = Which.Plain(model_id=str(folder), **how)
    runner = Runner(which=which, max_seqs=1, no_paged_attn=True)
    messages = [{"role": "user", "content": PROMPT}]
    request = ChatCompletionRequest(
        model="default", messages=messages, max_tokens=TOKENS, temperature=0.0, logprobs=True, top_logprobs=1
    )
    choice = runner.send_chat_completion_request(request).choices[0]
    tokens = choice.logprobs.content
    # Several tokens have no text of their own; among the likeliest, they are told by their numbers.
    ids = [token.top_logprobs[0].token for token in tokens]
    return ids, [token.logprob for token in tokens], choice.message.content


def text_of(path):
    command = [args.binary, "generate", path, "--prompt", PROMPT, "-n", str(TOKENS), "--temperature", "0", "--cpu"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def check(name, folder, arch, dtype, scratch, shard=None):
    if shard is None:
        (shard,) = (file.name for file in folder.glob("*-0.uqff"))
    tokens, found, theirs = run(folder, arch, dtype, from_uqff=shard)
    one = folder / shard if shard else folder
    dense = convert(one, Path(scratch, "dense"), "--dequantize", "--dtype", dtype.lower(), "--overwrite")
    expected_tokens, expected, _ = run(dense, arch, dtype)
    # Behind another token, where two are as likely but for what is rounded, all is another text.
    same = next((i for i, (a, b) in enumerate(zip(tokens, expected_tokens)) if a != b), len(tokens))
    far = max(abs(a - b) for a, b in zip(found[: same + 1], expected))
    ours, theirs = text_of(one), theirs.strip()
    common = len(os.path.commonprefix([ours, theirs]))
    print(
        f"{name}: loads and runs, log probabilities off by {far:.5f} at most, {same} of {len(tokens)} tokens are those of its numbers, "
        f"{common} of {len(theirs)} characters those of candle-quant",
        flush=True,
    )
    # Where activations have 8 bits, more is rounded.
    assert far < (0.2 if shard.startswith("q") else 0.05), (found, expected)


def check_text(name, folder, arch, shard):
    """A model with stacks of experts, of which mistral.rs loads no dense ones of these names."""
    _, _, theirs = run(folder, arch, "F32", from_uqff=shard)
    ours = text_of(folder / shard)
    common = len(os.path.commonprefix([ours, theirs.strip()]))
    print(f"{name}: loads and runs, {common} of {len(theirs.strip())} characters are those of candle-quant", flush=True)


def dtype_of(name, arch, k):
    """The dtype in which mistral.rs runs its own files of a type: biases are F32 beside most types, and of the model beside others."""
    is_wide = name in (*BLOCKS, *WHOLE) and name != "fp8"
    return "F32" if arch != "Qwen2" and k % 128 == 0 or arch == "Qwen2" and is_wide else "BF16"


def entries(file):
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__")
    return list(header.items()), data[8 + length :]


def of_k_types(items, data):
    types = {name: entry["data_offsets"][0] for name, entry in items if name.endswith(".weight.dtype")}
    return {name.removesuffix(".dtype") for name, at in types.items() if 10 <= data[at] <= 15}


def weights(stored, without):
    items, data = stored
    places = {name: entry["data_offsets"] for name, entry in items if name not in without}
    return {name: data[start:end] for name, (start, end) in places.items()}


def loose(items):
    """Without places, which are those of larger tensors."""
    return sorted((name, entry["dtype"], entry["shape"]) for name, entry in items)


for source in args.sources:
    config = json.loads((source / "config.json").read_text())
    arch, k = ARCHITECTURES[config["model_type"]], config["hidden_size"]
    with tempfile.TemporaryDirectory() as scratch:
        for name, spec in TYPES.items():
            out = convert(source, Path(scratch, name), "--to", "uqff", "--format", spec)
            what = f"{source.name} {name}"
            dtype = dtype_of(name, arch, k)
            if arch == "Qwen3Moe" and name in BLOCKS:
                check_text(what, out, arch, f"{name}-0.uqff")
            elif arch == "Qwen3Moe":
                print(f"{what}: written")
            else:
                check(what, out, arch, dtype, scratch)
            is_possible = arch != "Qwen3Moe" and k % 64 == 0 or name not in ("mxfp4", *WHOLE)
            if args.write and is_possible and name not in ("afq2", "afq3"):
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
                    assert loose(ours[0]) == loose(expected[0]), (what, file)
                    if name in SAME or not file.endswith(".uqff"):
                        # Embeddings and heads may be of K types.
                        searched = of_k_types(*ours)
                        assert weights(ours, searched) == weights(expected, searched), (what, file)
                print(f"{what}: as mistral.rs writes it" + ("" if name in SAME else ", but for codes and scales"))
        if arch != "Qwen3Moe":
            several = ("afq4", "q8_0", "q4k")
            out = convert(source, Path(scratch, "several"), "--to", "uqff", "--format", ",".join(several))
            for name in several:
                dtype = dtype_of(name, arch, k)
                check(f"{source.name} {name} of several", out, arch, dtype, scratch, f"{name}-0.uqff")
            dtype = dtype_of("afq4", arch, k)
            for spec in ("4:g32", "8:g128", "mxfp4"):
                mlx = convert(source, Path(scratch, f"mlx{spec}".replace(":", "")), "--recipe", "uniform", "--format", spec)
                out = convert(mlx, Path(scratch, f"repacked{spec}".replace(":", "")), "--to", "uqff", "--format", "keep")
                check(f"{source.name} MLX {spec} -> UQFF", out, arch, dtype, scratch)
