#!/usr/bin/env python3
"""Every place of the grids of GGML's IQ types, and the numbers that it stands for, by llama.cpp's Python package.

  pip install gguf==0.19.0 safetensors==0.8.0
  python ggml_grids.py tests/fixtures/gguf/grids.safetensors

Of each type `<name>.blocks`, U8 [blocks, bytes], with each place once in ascending order under a scale of one, and random
signs; and `<name>.eighths`, U8 [blocks, 256], eight times their elements and 128.
"""
import sys

import numpy as np
from gguf import GGMLQuantizationType, quants
from safetensors.numpy import save_file

random = np.random.default_rng(26)


def words(numbers, dtype):
    return np.ascontiguousarray(numbers.astype(dtype)).view(np.uint8)


def bits(count, below):
    return random.integers(0, below, count)


def joined(count, *parts):
    """Blocks: an F16 one, then the parts."""
    one = np.ones((count, 1), np.float16).view(np.uint8)
    return np.hstack([one, *(np.asarray(part, np.uint8).reshape(count, -1) for part in parts)])


tensors = {}
for name in ["IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"]:
    kind = getattr(quants, name)
    places, length = kind.grid_shape
    n = places * length // 256
    place = np.arange(places).reshape(n, -1)
    low, high = place & 255, place >> 8
    eights = 256 // 8 * n  # groups of eight elements with signs of their own
    if name == "IQ1_S":
        high = (high.reshape(-1, 4) << np.array([0, 3, 6, 9])).sum(1) | bits(n * 8, 2) << 15
        blocks = joined(n, low, words(high, np.uint16))
    elif name in ("IQ2_XXS", "IQ3_XXS"):
        signs = words((bits((eights // 4, 4), 128) << np.array([0, 7, 14, 21])).sum(1), np.uint32)
        if name == "IQ3_XXS":
            blocks = joined(n, low, signs)
        else:
            blocks = joined(n, np.hstack([low.reshape(-1, 4), signs.reshape(-1, 4)]))
    elif name == "IQ2_XS":
        blocks = joined(n, words(place | bits((n, 32), 128) << 9, np.uint16), np.zeros((n, 8)))
    elif name == "IQ2_S":
        high = (high.reshape(-1, 4) << np.array([0, 2, 4, 6])).sum(1)
        blocks = joined(n, low, bits(eights, 256), high, np.zeros((n, 8)))
    else:
        high = (high.reshape(-1, 8) << np.arange(8)).sum(1)
        blocks = joined(n, low, high, bits(eights, 256), np.zeros((n, 4)))
    eighths = 8 * quants.dequantize(blocks, GGMLQuantizationType[name]).reshape(n, 256)
    assert np.array_equal(eighths, eighths.astype(np.int8)) and len(np.unique(kind.grid.reshape(places, -1), axis=0)) == places
    tensors[f"{name.lower()}.blocks"] = blocks
    tensors[f"{name.lower()}.eighths"] = np.ascontiguousarray(eighths + 128, dtype=np.uint8)
save_file(tensors, sys.argv[1])
