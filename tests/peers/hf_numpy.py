"""Checkpoints of compressed-tensors in numpy alone: what is stored, and the weights that it stands for, in F32.

As the format is documented: a code less its zero, times the scale of its group, in f64, rounded once. Packed codes have half their
range added.
"""
import json
import struct
from pathlib import Path

import numpy as np

E4M3 = np.array([
    (-1) ** (code >> 7) * (code % 8 / 8 * 2.0**-6 if code >> 3 & 15 == 0 else (1 + code % 8 / 8) * 2.0 ** ((code >> 3 & 15) - 7))
    for code in range(256)
])
E4M3[[127, 255]] = np.nan
PLAIN = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I8": "i1", "U8": "u1"}


def tensors(folder):
    """All tensors of a folder by name; BF16 and F8_E4M3 as floats."""
    data = (Path(folder) / "model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header, found = json.loads(data[8 : 8 + length]), {}
    header.pop("__metadata__", None)
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        part = data[8 + length + start : 8 + length + end]
        if entry["dtype"] == "BF16":
            values = (np.frombuffer(part, "<u2").astype(np.uint32) << 16).view(np.float32)
        elif entry["dtype"] == "F8_E4M3":
            values = E4M3[np.frombuffer(part, np.uint8)]
        else:
            values = np.frombuffer(part, PLAIN[entry["dtype"]])
        found[name] = values.reshape(entry["shape"])
    return found


def unpacked(words, bits, axis):
    """Codes of a stream of bits along an axis, signed."""
    words = np.moveaxis(words, axis, -1)
    stream = (words.view(np.uint32)[..., None] >> np.arange(32, dtype=np.uint32)) & 1
    codes = stream.reshape(*words.shape[:-1], -1, bits) @ (1 << np.arange(bits))
    return np.moveaxis(codes - (1 << bits - 1), -1, axis)


def weight(parts):
    """The weight of a linear layer, by the names of its stored parts."""
    scale, zero = parts["weight_scale"].astype(np.float64), parts.get("weight_zero_point", 0)
    if "weight_packed" in parts:
        n, k = parts["weight_shape"]
        bits = 32 * parts["weight_packed"].shape[1] // k
        codes = unpacked(parts["weight_packed"], bits, 1)
        zero = unpacked(zero, bits, 0)[:n] if "weight_zero_point" in parts else 0
    else:
        codes, (n, k) = parts["weight"], parts["weight"].shape
    scale = scale.reshape(-1, 1) if scale.ndim < 2 else scale
    rows, groups = np.arange(n) * len(scale) // n, np.arange(k) * scale.shape[1] // k
    groups = parts.get("weight_g_idx", groups)
    wide = lambda values: values[rows][:, groups] if np.ndim(values) else values  # noqa: E731
    return ((codes - wide(zero)) * wide(scale)).astype(np.float32)


def decoded(folder):
    """Every tensor of the model, F32, without what the tool keeps for activations."""
    modules, found = {}, {}
    for name, value in tensors(folder).items():
        module, _, part = name.rpartition(".")
        modules.setdefault(module, {})[part] = value
    for module, parts in modules.items():
        if "weight_scale" in parts:
            parts = {"weight": weight(parts)} | {part: value for part, value in parts.items() if part == "bias"}
        of_model = {part: value for part, value in parts.items() if part in ["weight", "bias"]}
        found |= {f"{module}.{part}": value.astype(np.float32) for part, value in of_model.items()}
    return found
