#!/usr/bin/env python3
"""The tiny models of tests/fixtures/families as UQFF files, by mistral.rs itself.

  pip install mistralrs==0.9.5 torch==2.15.0 transformers==5.23.0
  python families_uqff.py tests/fixtures/families [FAMILY...]

Writes FAMILY/uqff/ of FAMILY/hf with the config in published naming: the shard, the residual and the config as they were
written, and refs.safetensors, the logits of transformers in F32 for the numbers that the files stand for, which are decoded
here. Every number is compared with that of FAMILY/hf, so that a tensor under another name or in another order is noticed.
"""
import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from mistralrs import Architecture, ModelDType, MultimodalArchitecture, Runner, Which
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from uqff_towers import PROCESSOR, TOWERS

FAMILIES = Path(sys.argv[1])

# What mistral.rs calls the architecture, and the type: AFQ has groups of 64, Q8_0 and MXFP4 blocks of 32. Rows that are no
# whole number of them stay as they are.
WRITTEN = {
    "deepseek_v2": ("DeepseekV2", "q8_0"),
    "deepseek_v3": ("DeepseekV3", "q8_0"),
    "gemma": ("Gemma", "afq4"),
    "gemma2": ("Gemma2", "afq4"),
    "gemma3_text": ("Gemma3", "afq4"),
    "glm4": ("GLM4", "afq4"),
    "glm4_moe": ("GLM4Moe", "q8_0"),
    "gpt_oss": ("GptOss", "mxfp4"),
    "granite": ("GraniteMoeHybrid", "afq4"),
    "granitemoe": ("GraniteMoeHybrid", "afq4"),
    "hunyuan_v1_dense": ("HunYuanDenseV1", "afq4"),
    "llama": ("Llama", "afq4"),
    "llama4_text": ("Llama4", "q8_0"),
    "llama4_text-dense": ("Llama4", "afq4"),
    "ministral3": ("Mistral3", "afq4"),
    "mistral": ("Mistral", "afq4"),
    "mixtral": ("Mixtral", "q8_0"),
    "phi": ("Phi2", "afq4"),
    "phi3": ("Phi3", "afq4"),
    "phi3-plain": ("Phi3", "afq4"),
    "phi3-short": ("Phi3", "afq4"),
    "qwen2": ("Qwen2", "afq4"),
    "qwen3": ("Qwen3", "afq4"),
    "qwen3_5_moe_text": ("Qwen3_5Moe", "afq4"),
    "qwen3_5_text": ("Qwen3_5", "afq4"),
    "qwen3_moe": ("Qwen3Moe", "afq4"),
    "qwen3_next": ("Qwen3Next", "afq4"),
    "smollm3": ("SmolLm3", "afq4"),
    "starcoder2": ("Starcoder2", "afq4"),
}
# What mistral.rs wants to be said that means nothing else, or does not have otherwise.
THREE_SECTIONS = {
    "rope_type": "default", "rope_theta": 1000.0, "mrope_interleaved": True, "mrope_section": [1, 1, 1],
}
CONFIGS = {
    "gemma": {"attention_bias": False},
    "gemma2": {"attention_bias": False},
    "gpt_oss": {"attention_bias": True},
    "llama4_text": {"attn_temperature_tuning": 4},
    "llama4_text-dense": {"attn_temperature_tuning": 0, "interleave_moe_layer_step": 1},
    "phi3": {"hidden_act": "silu"},
    "phi3-plain": {"hidden_act": "silu"},
    "phi3-short": {"hidden_act": "silu"},
    "qwen3": {"attention_bias": False, "max_window_layers": 2, "use_sliding_window": False},
    "qwen3_5_moe_text": {"rope_parameters": THREE_SECTIONS | {"partial_rotary_factor": 0.75}},
    "qwen3_5_text": {"rope_parameters": THREE_SECTIONS | {"partial_rotary_factor": 0.375}},
    "qwen3_moe": {"max_window_layers": 2, "use_sliding_window": False},
    "qwen3_next": {"mlp_only_layers": []},
}


def with_tower(name, config, weights):
    """The same as the text of a model with a tower for images, where mistral.rs has no other."""
    tower = TOWERS[name]
    prefixes = {"model.": tower.text, "lm_head.": tower.head}
    weights = {
        prefix + name.removeprefix(own): weight
        for own, prefix in prefixes.items() for name, weight in weights.items() if name.startswith(own)
    }
    weights |= {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in tower.tensors.items()}
    beside = {"model_type": tower.model_type, "tie_word_embeddings": config["tie_word_embeddings"]}
    return tower.config | beside | {"text_config": config}, weights


def text_of(name, weights):
    """The tensors of the text by the names of a model of text alone."""
    prefixes = {TOWERS[name].text: "model.", TOWERS[name].head: "lm_head."}
    return {
        own + name.removeprefix(prefix): weight
        for prefix, own in prefixes.items() for name, weight in weights.items() if name.startswith(prefix)
    }


def source_of(family, folder):
    """The checkpoint that mistral.rs reads."""
    config = json.loads((family / "hf/config_v4.json").read_text()) | CONFIGS.get(family.name, {})
    if family.name == "gemma":  # mistral.rs refuses both
        del config["hidden_activation"]
    weights = load_file(family / "hf/model.safetensors")
    if family.name == "qwen3_next":  # the layer that has no experts gets those of the other one
        for name in [name for name in weights if name.startswith("model.layers.1.mlp.")]:
            del weights[name]
        experts = {name: weight for name, weight in weights.items() if name.startswith("model.layers.0.mlp.")}
        weights |= {name.replace("layers.0", "layers.1"): weight.clone() for name, weight in experts.items()}
    if family.name in TOWERS:
        config, weights = with_tower(family.name, config, weights)
    save_file(weights if family.name != "gpt_oss" else packed(weights), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    # Words that stand for themselves, and a template: mistral.rs does not start without them.
    vocabulary = {f"<{token}>": token for token in range(96)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<0>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = {"chat_template": "{{ messages[0]['content'] }}", "bos_token": "<1>", "eos_token": "<2>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(template))
    (folder / "preprocessor_config.json").write_text("{}")
    (folder / "processor_config.json").write_text(json.dumps(PROCESSOR))
    return weights


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([E2M1, -E2M1])


def packed(weights):
    """gpt-oss as published: experts in MXFP4, of which mistral.rs reads no others with rows of gate and up in turn."""
    out = {}
    for name, weight in weights.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            out[name] = weight
            continue
        blocks = weight.float().transpose(1, 2).numpy()  # as [E, N, K]
        blocks = blocks.reshape(*blocks.shape[:2], -1, 32)
        exponents = np.floor(np.log2(np.abs(blocks).max(-1, keepdims=True))) - 2
        codes = np.abs(blocks[..., None] / 2.0 ** exponents[..., None] - E2M1).argmin(-1).astype(np.uint8)
        out[name + "_blocks"] = torch.from_numpy(codes[..., ::2] | codes[..., 1::2] << 4)
        out[name + "_scales"] = torch.from_numpy(np.ascontiguousarray(exponents[..., 0] + 127).astype(np.uint8))
    return out


def write(family, source, folder):
    arch, kind = WRITTEN[family.name]
    how = dict(model_id=str(source), write_uqff=str(folder / f"{kind}.uqff"), dtype=ModelDType.BF16)
    if hasattr(Architecture, arch):
        which = Which.Plain(arch=getattr(Architecture, arch), **how)
    else:
        which = Which.MultimodalPlain(arch=getattr(MultimodalArchitecture, arch), **how)
    Runner(which=which, in_situ_quant=kind, max_seqs=1, no_paged_attn=True)


def decoded(shard):
    """The numbers of the layers, by the definitions of their formats."""
    entries = load_file(shard)
    out = {name: tensor.float() for name, tensor in entries.items() if name.endswith(".bias")}
    for name in [name.removesuffix(".format") for name in entries if name.endswith(".weight.format")]:
        weight, kind = entries[name], int(entries[name + ".format"])
        if kind == 1:  # Unquant
            out[name] = weight.float()
        elif kind == 4:  # AFQ: a stream of bits, of which the first is the lowest
            bits = int(entries[name + ".bits"])
            stream = np.unpackbits(weight.contiguous().view(torch.uint8).numpy(), axis=-1, bitorder="little")
            stream = stream.reshape(*stream.shape[:-1], -1, bits).astype(np.float32)
            codes = stream @ (2.0 ** np.arange(bits)).astype(np.float32)
            scales, biases = (entries[f"{name}.{part}"].float().numpy()[..., None] for part in ("scales", "biases"))
            groups = codes.reshape(*scales.shape[:-1], -1)
            out[name] = torch.from_numpy((groups * scales + biases).reshape(codes.shape))
        elif kind == 0 and int(entries[name + ".dtype"]) == 0:  # GGML F32
            out[name] = weight.view(torch.float32).reshape(entries[name + ".shape"].tolist())
        elif kind == 0:  # GGML: blocks of an F16 scale and codes of 8 bits
            assert int(entries[name + ".dtype"]) == 8, (name, entries[name + ".dtype"])
            blocks = weight.numpy().reshape(-1, 34)
            scales = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
            codes = np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32)
            out[name] = torch.from_numpy((scales * codes).reshape(entries[name + ".shape"].tolist()))
        elif kind == 6:  # MXFP4
            blocks, scales = weight.numpy(), entries[name + ".scales"].numpy().astype(np.float32)
            blocks = blocks.reshape(*scales.shape[:-1], -1)
            values = E2M1[np.stack([blocks & 15, blocks >> 4], -1)].reshape(*scales.shape, 32)
            out[name] = torch.from_numpy((values * 2.0 ** (scales[..., None] - 127)).reshape(*scales.shape[:-1], -1))
        else:
            raise ValueError(f"{name}: format {kind}")
    return out


def renamed(numbers, family, source):
    """By the names of the source, which has experts one by one, or gate and up projections of all in one stack."""
    out = {}
    for name, tensor in numbers.items():
        head, _, tail = name.partition(".experts.")
        stack, stacked = f"{head}.experts.gate_up_proj", f"{head}.experts.down_proj"
        if not tail:
            out[name.replace("model.norm.", "model.final_layernorm.") if family == "phi" else name] = tensor
        elif family == "gpt_oss":
            module, part = name.rsplit(".", 1)
            out[module + ("_bias" if part == "bias" else "")] = tensor if part == "bias" else tensor.transpose(1, 2)
        elif stack in source:
            turned = (lambda stack: stack.transpose(1, 2)) if family.startswith("llama4") else (lambda stack: stack)
            parts = [numbers[f"{head}.experts.{part}_proj.weight"] for part in ("gate", "up")]
            out |= {stack: turned(torch.cat(parts, 1)), stacked: turned(numbers[stacked + ".weight"])}
        else:
            if family == "mixtral":
                tail = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[tail.split(".")[0]] + ".weight"
            out |= {f"{head}.experts.{expert}.{tail}": matrix for expert, matrix in enumerate(tensor)}
    return out


def check(numbers, source):
    assert numbers.keys() == source.keys(), (numbers.keys() - source.keys(), source.keys() - numbers.keys())
    for name, expected in source.items():
        found, expected = numbers[name].float(), expected.float()
        assert found.shape == expected.shape, (name, found.shape, expected.shape)
        far = ((found - expected).norm() / expected.norm()).item()
        assert far < 0.25 if found.ndim > 1 else far == 0, (name, far)


def compute(family, folder, numbers):
    """The logits of transformers for these numbers."""
    with tempfile.TemporaryDirectory() as scratch:
        save_file({name: tensor.contiguous() for name, tensor in numbers.items()}, Path(scratch, "model.safetensors"))
        config = json.loads((folder / "config.json").read_text())
        config = config.get("text_config", config)
        if "attn_temperature_tuning" in config:  # published as a number
            config["attn_temperature_tuning"] = bool(config["attn_temperature_tuning"])
        Path(scratch, "config.json").write_text(json.dumps(config))
        model, info = AutoModelForCausalLM.from_pretrained(
            scratch, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    assert not any(info.values()), info
    tokens = load_file(family / "hf/refs.safetensors")["tokens"]
    with torch.no_grad():
        logits = model.float().eval()(tokens.reshape(1, -1).long()).logits[0]
    top = logits.topk(2, dim=-1).values
    gap = (top[:, 0] - top[:, 1]).min().item() / logits.std().item()
    assert gap > 1e-3, ("two tokens are as likely", gap)
    save_file({"tokens": tokens, "logits_f32": logits.contiguous()}, folder / "refs.safetensors")
    return gap


def convert(family):
    folder = family / "uqff"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with tempfile.TemporaryDirectory() as scratch:
        source = source_of(family, Path(scratch))
        write(family, scratch, folder)
    shards = sorted(folder.glob("*.uqff"))
    for file in folder.iterdir():
        if file not in shards and file.name not in ("config.json", "residual.safetensors"):
            file.unlink()
    assert len(shards) == 1, shards
    residual = {name: tensor.float() for name, tensor in load_file(folder / "residual.safetensors").items()}
    numbers = renamed(decoded(shards[0]) | residual, family.name, source)
    if family.name in TOWERS:
        numbers, source = (text_of(family.name, each) for each in (numbers, source))
    check(numbers, source)
    return compute(family, folder, numbers)


for family in sorted(FAMILIES.iterdir()):
    if family.name not in WRITTEN or sys.argv[2:] and family.name not in sys.argv[2:]:
        continue
    try:
        gap = convert(family)
        sizes = {file.name: file.stat().st_size for file in (family / "uqff").iterdir()}
        print(f"{family.name}: the closest two tokens are {gap:.4f} apart, {sizes}", flush=True)
    except BaseException as error:  # also panics; the next one may go
        shutil.rmtree(family / "uqff", ignore_errors=True)
        print(f"{family.name}: {type(error).__name__} {str(error)[:400]}", flush=True)
