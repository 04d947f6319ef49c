#!/usr/bin/env python3
"""GGUF files of `convert --to gguf`, read by llama.cpp's Python package.

  pip install gguf==0.19.0 torch==2.15.0 safetensors==0.8.0
  python gguf_files.py CANDLE_QUANT SOURCE [FORMAT...]

SOURCE is a folder of safetensors without packed weights. Converts it to each FORMAT (all by default), and compares: tensors in
Q4_0 to Q8_0 with what `gguf.quants` makes of the numbers of the dense file, bit for bit; others, dequantized by it, with the
error that the report tells; offsets, alignment and the tokenizer's arrays.
"""
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, quants

PROGRAM, SOURCE = sys.argv[1:3]
FORMATS = sys.argv[3:] or [
    "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "mxfp4", "nvfp4",
]


def numbers(tensor):
    if tensor.tensor_type in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        return np.asarray(tensor.data, dtype=np.float32)
    return quants.dequantize(np.asarray(tensor.data), tensor.tensor_type)


def convert(folder, name, *options):
    out, report = folder / name, folder / f"{name}.json"
    command = [PROGRAM, "convert", SOURCE, "--to", "gguf", "--out", out, "--report", report, "--quiet", *options]
    subprocess.run(command, check=True)
    reader = GGUFReader(out / "model.gguf")
    assert reader.alignment == 32 and all(tensor.data_offset % 32 == 0 for tensor in reader.tensors)
    return reader, {entry["name"]: entry for entry in json.loads(report.read_text())["tensors"]}


with tempfile.TemporaryDirectory() as folder:
    dense, _ = convert(Path(folder), "dense", "--dequantize")
    exact = {tensor.name: numbers(tensor) for tensor in dense.tensors}
    tokens = dense.fields["tokenizer.ggml.tokens"].contents() if "tokenizer.ggml.tokens" in dense.fields else []
    if tokens:
        assert len(dense.fields["tokenizer.ggml.token_type"].contents()) == len(tokens)
        assert len(tokens) == len(exact["token_embd.weight"])
    for format in FORMATS:
        reader, report = convert(Path(folder), format, "--format", format)
        errors = sorted(entry["relative_rms"] for entry in report.values())
        found, types = [], {}
        for tensor in reader.tensors:
            kind, weights = tensor.tensor_type, exact[tensor.name]
            types[kind.name] = types.get(kind.name, 0) + 1
            assert numbers(tensor).shape == weights.shape, tensor.name
            if kind.name in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"):
                assert np.array_equal(quants.quantize(weights, kind), tensor.data), tensor.name
            error = numbers(tensor).astype(np.float64) - weights
            found.append(np.sqrt((error**2).sum() / (weights.astype(np.float64) ** 2).sum()))
        assert abs(max(found) - errors[-1]) <= 1e-4 * errors[-1], (max(found), errors[-1])
        print(format, types, f"largest relative error {max(found):.5f}")
