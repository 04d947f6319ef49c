#!/usr/bin/env python3
"""Statistics of what layers are given, by transformers, and importance matrices of them in both forms of llama.cpp.

  pip install torch==2.15 transformers==5.23 safetensors gguf==0.19
  python importance.py tests/fixtures/families tests/fixtures/importance

Runs qwen3 and qwen3_moe of FAMILIES/<family>/hf in f32 on the tokens of hf/refs.safetensors, as two texts, and sums the
squares of what every matrix is multiplied by, in f64. Writes

  <family>.safetensors   MODULE.in_sum2 F64 [experts, K] and MODULE.counts I64 [experts], 1 for what is no stack
  <family>.dat           the same as llama-imatrix wrote it until 2025: mean squares times the number of calls
  <family>.gguf          the same as it writes it since: `general.type` imatrix, X.in_sum2 and X.counts

with llama.cpp's names in the last two: stacks of experts are one entry, the embedding has none.
"""
import struct
import sys
from pathlib import Path

import gguf
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

FAMILIES, OUT = Path(sys.argv[1]), Path(sys.argv[2])
CALLS = 2  # One for each text.
PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}


def collect(folder):
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager")
    places, sums, counts = {}, {}, {}
    for name, weight in model.named_parameters():
        module, experts = name.removesuffix(".weight"), weight.shape[0] if weight.dim() == 3 else 1
        modules = [module.replace("gate_up_proj", part) for part in ("gate_proj", "up_proj")]
        for part in modules if "gate_up_proj" in module else [module]:
            sums[part] = torch.zeros(experts, weight.shape[-1], dtype=torch.float64)
            counts[part] = torch.zeros(experts, dtype=torch.int64)
            for expert in range(experts):
                place = weight[expert] if weight.dim() == 3 else weight
                places.setdefault(place.data_ptr(), []).append((part, expert))
    linear = torch.nn.functional.linear

    def seen(x, weight, bias=None):
        rows = x.detach().reshape(-1, x.shape[-1]).double()
        for part, expert in places[weight.data_ptr()]:
            sums[part][expert] += (rows * rows).sum(0)
            counts[part][expert] += len(rows)
        return linear(x, weight, bias)

    torch.nn.functional.linear = seen
    tokens = load_file(folder / "refs.safetensors")["tokens"].long()
    with torch.no_grad():
        for text in tokens.chunk(CALLS):
            model(text[None])
    torch.nn.functional.linear = linear
    if model.config.tie_word_embeddings:  # The head and the embedding are one.
        sums["lm_head"], counts["lm_head"] = sums.pop("model.embed_tokens"), counts.pop("model.embed_tokens")
    used = [part for part in sums if counts[part].sum() > 0]
    return {part: (sums[part], counts[part]) for part in used}


def name_of(module):
    if module == "lm_head":
        return "output.weight"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{PARTS[part]}.weight"


def write_old(path, statistics):
    with open(path, "wb") as file:
        file.write(struct.pack("<i", len(statistics)))
        for module, (sums, counts) in statistics.items():
            means = sums / counts.clamp(min=1)[:, None]
            values = (means * CALLS).float().flatten().tolist()
            name = name_of(module).encode()
            file.write(struct.pack("<i", len(name)) + name + struct.pack("<ii", CALLS, len(values)))
            file.write(struct.pack(f"<{len(values)}f", *values))
        file.write(struct.pack("<i", CALLS) + struct.pack("<i", 9) + b"texts.txt")


def write_gguf(path, statistics):
    writer = gguf.GGUFWriter(path, arch="")
    writer.kv_data[0].clear()  # llama-imatrix states no architecture.
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["texts.txt"])
    writer.add_uint32("imatrix.chunk_count", CALLS)
    writer.add_uint32("imatrix.chunk_size", 20)
    for module, (sums, counts) in statistics.items():
        writer.add_tensor(f"{name_of(module)}.in_sum2", sums.float().numpy())
        writer.add_tensor(f"{name_of(module)}.counts", counts.float()[:, None].numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


OUT.mkdir(exist_ok=True)
for family in ["qwen3", "qwen3_moe"]:
    statistics = collect(FAMILIES / family / "hf")
    tensors = {f"{module}.in_sum2": sums.contiguous() for module, (sums, _) in statistics.items()}
    tensors |= {f"{module}.counts": counts for module, (_, counts) in statistics.items()}
    save_file(tensors, OUT / f"{family}.safetensors")
    write_old(OUT / f"{family}.dat", statistics)
    write_gguf(OUT / f"{family}.gguf", statistics)
    print(family, *(f"{module} {list(sums.shape)} {counts.tolist()}" for module, (sums, counts) in statistics.items()), sep="\n  ")
