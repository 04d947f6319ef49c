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
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

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
# One layer of experts, as published: each has its projections.
EXPERTS = MODEL | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 96,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "attention_bias": False,
    "num_attention_heads": 2,
}
KINDS = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM)}
TOKENS = [(7 * i + 3) % 64 for i in range(16)]


def packages(root, names):
    """Makes packages of these names below root importable without running their __init__.py."""
    for name in names:
        package = types.ModuleType(name)
        package.__path__ = [str(root / name.replace(".", "/"))]
        sys.modules[name] = package


def published(weights):
    """Experts one by one; transformers has them in stacks, gate and up in one."""
    split = {}
    for name, value in weights.items():
        block, found, projection = name.rpartition(".experts.")
        if not found:
            split[name] = value
            continue
        for expert, of_expert in enumerate(value):
            parts = of_expert.chunk(2) if projection == "gate_up_proj" else [of_expert]
            names = ["gate_proj", "up_proj"] if projection == "gate_up_proj" else [projection]
            split |= {f"{block}.experts.{expert}.{name}.weight": part for name, part in zip(names, parts)}
    return split


def stacked(weights, names):
    """The contrary, for a model that has these names."""
    joined = {}
    for name in names:
        block, found, projection = name.rpartition(".experts.")
        if not found:
            joined[name] = weights[name]
            continue
        parts = ["gate_proj", "up_proj"] if projection == "gate_up_proj" else [projection]
        count = sum(other.startswith(f"{block}.experts.") and other.endswith(f".{parts[0]}.weight") for other in weights)
        of_expert = lambda expert: torch.cat([weights[f"{block}.experts.{expert}.{part}.weight"] for part in parts])  # noqa: E731
        joined[name] = torch.stack([of_expert(expert) for expert in range(count)])
    return joined


def random_model(dtype, settings):
    torch.manual_seed(20)
    config, kind = KINDS[settings["model_type"]]
    model = kind(config(**settings, attn_implementation="eager"))
    for name, value in model.state_dict().items():
        center = 1.0 if "norm" in name else 0.0
        value.copy_((torch.randn(value.shape) * 0.09 + center).to(dtype))
    return model.float(), published({name: value.to(dtype) for name, value in model.state_dict().items()})


def is_linear(name):
    return name.endswith("_proj.weight")


def write_expected(folder, model, decoded):
    """What has to come out of the checkpoint in a folder: the decoded tensors, and what the model in F32 makes of them."""
    model.load_state_dict(stacked(decoded, model.state_dict()))
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0].float()
    refs = {"tokens": torch.tensor(TOKENS, dtype=torch.int32), "logits_f32": logits}
    save_file(refs, folder / "refs.safetensors")
    digest = lambda t: hashlib.sha256(t.numpy().astype("<f4").tobytes()).hexdigest()  # noqa: E731
    expected = {name: {"shape": list(t.shape), "sha256": digest(t)} for name, t in sorted(decoded.items())}
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    print(f"{folder.name}: {sum(f.stat().st_size for f in folder.iterdir())} bytes, logits {logits.std():.3f}")


def write(folder, quantization_config, quantize_one, dtype=torch.bfloat16, beside=None, tolerance=0.08, settings=MODEL):
    """quantize_one(module, weight) gives the stored tensors by suffix and the decoded weight, or None."""
    model, weights = random_model(dtype, settings)
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
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(settings, torch_dtype=str(dtype).removeprefix("torch."))
    if quantization_config is not None:
        config["quantization_config"] = quantization_config
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    for file, content in (beside or {}).items():
        (folder / file).write_text(json.dumps(content, indent=1) + "\n")
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    write_expected(folder, model, decoded)
