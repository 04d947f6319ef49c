"""The tiny model whose weights the scripts beside this one quantize, and the folder that they write for each case.

  config.json, model.safetensors  a Qwen3 of one layer with random weights, as published checkpoints look
  expected.json                   shape and SHA-256 (of little-endian F32) of every decoded tensor, by the peer's decoder
  refs.safetensors                tokens i32 [T] and logits_f32 [T, V] of transformers with these decoded tensors
"""
import hashlib
import json
import sys
import types

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

MODEL = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "hidden_act": "silu",
}
TOKENS = [(7 * i + 3) % 64 for i in range(16)]


def packages(root, names):
    """Makes packages of these names below root importable without running their __init__.py."""
    for name in names:
        package = types.ModuleType(name)
        package.__path__ = [str(root / name.replace(".", "/"))]
        sys.modules[name] = package


def random_model(dtype):
    torch.manual_seed(20)
    model = Qwen3ForCausalLM(Qwen3Config(**MODEL, attn_implementation="eager"))
    for name, value in model.state_dict().items():
        center = 1.0 if "norm" in name else 0.0
        value.copy_((torch.randn(value.shape) * 0.09 + center).to(dtype))
    return model.float(), {name: value.to(dtype) for name, value in model.state_dict().items()}


def is_linear(name):
    return name.endswith("_proj.weight")


def write(folder, quantization_config, quantize_one, dtype=torch.bfloat16, beside=None, tolerance=0.08):
    """quantize_one(module, weight) gives the stored tensors by suffix and the decoded weight, or None."""
    model, weights = random_model(dtype)
    stored, decoded = {}, {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        parts = quantize_one(module, weight) if is_linear(name) else None
        if parts is None:
            stored[name], decoded[name] = weight, weight.float()
        else:
            stored.update({f"{module}.{suffix}": part.contiguous() for suffix, part in parts[0].items()})
            decoded[name] = parts[1].float().contiguous()
            assert (decoded[name] - weight.float()).abs().max() < tolerance, name
    model.load_state_dict(decoded)
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0].float()
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(MODEL, torch_dtype=str(dtype).removeprefix("torch."))
    if quantization_config is not None:
        config["quantization_config"] = quantization_config
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    for file, content in (beside or {}).items():
        (folder / file).write_text(json.dumps(content, indent=1) + "\n")
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    refs = {"tokens": torch.tensor(TOKENS, dtype=torch.int32), "logits_f32": logits}
    save_file(refs, folder / "refs.safetensors")
    digest = lambda t: hashlib.sha256(t.numpy().astype("<f4").tobytes()).hexdigest()  # noqa: E731
    expected = {name: {"shape": list(t.shape), "sha256": digest(t)} for name, t in sorted(decoded.items())}
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    print(f"{folder.name}: {sum(f.stat().st_size for f in folder.iterdir())} bytes, logits {logits.std():.3f}")
