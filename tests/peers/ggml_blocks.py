#!/usr/bin/env python3
"""Blocks of GGML's types and the numbers that they stand for, by llama.cpp's Python package.

  pip install gguf==0.19.0 safetensors==0.8.0
  python ggml_blocks.py tests/fixtures/gguf/blocks.safetensors

Of each type `<name>.blocks`, U8 [rows, bytes], random bytes under scales that are finite, and `<name>.values`, F32
[rows, 512]. Names are those of `gguf.GGMLQuantizationType` in lower case. Types that the package does not dequantize
(q8_1, q8_k, q1_0) are dequantized here, by their definitions in ggml-common.h.
"""
import sys

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from safetensors.numpy import save_file

ROWS, K = 2, 512
# Where F16 numbers lie in a block; scales of bytes may be anything.
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q8_1": [0, 2],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
    "IQ4_NL": [0], "IQ4_XS": [0], "TQ1_0": [52], "TQ2_0": [64], "Q8_K": [],
    "IQ1_S": [0], "IQ1_M": [], "IQ2_XXS": [0], "IQ2_XS": [0], "IQ2_S": [0], "IQ3_XXS": [0], "IQ3_S": [0], "Q1_0": [0],
}

random = np.random.default_rng(26)
tensors = {}
for name, halves in HALVES.items():
    kind = GGMLQuantizationType[name]
    elements, size = GGML_QUANT_SIZES[kind]
    size = {"Q8_1": 36}.get(name, size)  # the package counts the scales of older versions
    blocks = random.integers(0, 256, (ROWS * K // elements, size), np.uint8)
    if name == "TQ1_0":
        # Digits of numbers below 3^5, as ggml writes them: ceil(n * 256 / 243).
        digits = random.integers(0, 243, blocks[:, :52].shape)
        digits[:, 48:] = digits[:, 48:] // 3 * 3
        blocks[:, :52] = (digits * 256 + 242) // 243
    if name == "TQ2_0":
        blocks[:, :64] = sum(random.integers(0, 3, (len(blocks), 64)) << shift for shift in (0, 2, 4, 6))
    for at in halves:
        numbers = (random.standard_normal(len(blocks)) / 50).astype(np.float16)
        blocks[:, at : at + 2] = numbers[:, None].view(np.uint8)
    if name == "IQ1_M":
        # The highest four bits of four words are the F16 number.
        numbers = (random.standard_normal(len(blocks)) / 50).astype(np.float16).view(np.uint16)
        for word in range(4):
            high = blocks[:, 49 + 2 * word]
            high[:] = high & 15 | (numbers >> 4 * word & 15) << 4
    if name == "Q1_0":
        bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little")
        numbers = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        values = np.where(bits == 1, numbers, -numbers)
    elif name == "Q8_1":
        values = blocks[:, :2].copy().view(np.float16).astype(np.float32) * blocks[:, 4:].view(np.int8)
    elif name == "Q8_K":
        blocks[:, :4] = (random.standard_normal(len(blocks)) / 50).astype(np.float32)[:, None].view(np.uint8)
        values = blocks[:, :4].copy().view(np.float32) * blocks[:, 4:260].view(np.int8)
    else:
        values = quants.dequantize(blocks, kind)
    blocks = blocks.reshape(ROWS, -1)
    tensors[f"{name.lower()}.blocks"] = np.ascontiguousarray(blocks)
    tensors[f"{name.lower()}.values"] = np.ascontiguousarray(values.reshape(ROWS, K), dtype=np.float32)
save_file(tensors, sys.argv[1])
