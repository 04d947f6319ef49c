#!/usr/bin/env python3
"""What mlx-lm makes of a gpt-oss checkpoint as it was published: names, and the bytes behind them.

  pip install 'mlx[cpu]==0.32.4' 'mlx-lm==0.32.2'
  python gpt_oss_layout.py tests/fixtures/mlx/gptoss-mxfp4-hf

Writes sanitized.json: for every tensor its dtype, shape and the SHA-256 of its bytes.
"""
import hashlib
import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.models.gpt_oss import Model, ModelArgs

folder = Path(sys.argv[1])
model = Model(ModelArgs.from_dict(json.loads((folder / "config.json").read_text())))
weights = model.sanitize(mx.load(str(folder / "model.safetensors")))


def entry(array):
    dtype = str(array.dtype).removeprefix("mlx.core.")
    data = np.array(mx.contiguous(array.view(mx.uint16) if dtype == "bfloat16" else array))
    return {"dtype": dtype, "shape": list(array.shape), "sha256": hashlib.sha256(data.tobytes()).hexdigest()}


entries = {name: entry(array) for name, array in sorted(weights.items())}
(folder / "sanitized.json").write_text(json.dumps(entries, indent=1) + "\n")
