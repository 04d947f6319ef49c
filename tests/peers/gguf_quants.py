#!/usr/bin/env python3
"""The types without super-blocks as the reference of ggml quantizes, by llama.cpp's Python package.

  pip install gguf==0.19.0 safetensors==0.8.0
  python gguf_quants.py tests/fixtures/gguf/quants.safetensors

`weights`, F32 [rows, 64]: normal numbers of many magnitudes, and rows of zeros, of one number, of ties between codes, with
their largest magnitude at either sign, twice, and of BF16 numbers. `q4_0` to `q8_0`, U8 [rows, bytes], are the blocks
of these rows.
"""
import sys

import numpy as np
from gguf import GGMLQuantizationType, quants
from safetensors.numpy import save_file

random = np.random.default_rng(26)
rows = [random.standard_normal(64) * 10.0 ** exponent for exponent in range(-6, 4) for _ in range(12)]
rows += [np.zeros(64), np.full(64, 0.25), np.full(64, -3.0)]
# Half way between codes: of Q8_0 with a scale of 1, of Q4_0 with one of 1 or -1.
rows += [np.concatenate([np.arange(-32, 31) + 0.5, [largest]]) for largest in (127, -127)]
rows += [np.tile(np.concatenate([np.arange(-8, 8) + 0.5, np.arange(-8, 8)]), 2) * sign for sign in (1, -1)]
rows += [np.tile([8.0, -8.0] + [0.1] * 30, 2), np.tile([-8.0, 8.0] + [0.1] * 30, 2), np.full(64, 1e-9)]
weights = np.asarray(rows, dtype=np.float32)
# Numbers of few bits, of which more are half way but for a rounding.
few = (random.standard_normal((60, 64)) / 20).astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
weights = np.concatenate([weights, few.view(np.float32)])
tensors = {"weights": weights}
for kind in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"):
    tensors[kind.lower()] = quants.quantize(weights, GGMLQuantizationType[kind])
save_file(tensors, sys.argv[1])
