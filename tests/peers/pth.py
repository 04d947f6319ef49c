#!/usr/bin/env python3
"""A linear layer as PyTorch saves it, by itself and below the key `state` of a training checkpoint.

  pip install torch==2.15.0
  python pth.py tests/fixtures/pth
"""
import sys
from pathlib import Path

import torch

OUT = Path(sys.argv[1])
OUT.mkdir(parents=True, exist_ok=True)
layer = {
    "layer.0.weight": torch.arange(-4.0, 4.0).reshape(2, 4) / 8,
    "layer.0.bias": torch.tensor([0.5, -0.25]),
}
torch.save(layer, OUT / "plain.pth")
torch.save({"state": layer, "epoch": 3}, OUT / "state.pth")
