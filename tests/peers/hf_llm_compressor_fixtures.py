#!/usr/bin/env python3
"""Tiny checkpoints written by llm-compressor's `oneshot` on a CPU, from the model in a folder to the folder that it saves.

  pip install llmcompressor==0.14.0.1 && python hf_llm_compressor_fixtures.py tests/fixtures/hf awq fp8-kv w4a8
  pip install llmcompressor==0.8.1 && python hf_llm_compressor_fixtures.py tests/fixtures/hf gptq-order

The first three were made with compressed-tensors 0.19.0 and transformers 5.17.0, the last with 0.12.2 and 4.56.2, all on
torch 2.15.0, which is newer than the tool asks for (`pip install --no-deps`). compressed-tensors 0.12.2 is the last with which GPTQ
writes `weight_g_idx`: llm-compressor 0.14 refuses `actorder` `group`. Config and model are as the tool wrote them. Weights are
decoded by hf_numpy.py, and compared with what the tool unpacks itself, which is rounded to BF16.
"""
import copy
import sys
import tempfile
from pathlib import Path

import torch
from compressed_tensors import ModelCompressor
from datasets import Dataset
from hf_model import MODEL, random_model, write_expected
from hf_numpy import decoded
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig, PreTrainedTokenizerFast

OUT, CASES = Path(sys.argv[1]), sys.argv[2:]
torch.Tensor.pin_memory = lambda self, *_: self  # AWQ pins what it keeps, which takes a GPU


def gptq_order():
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "actorder": "group"}
    return [GPTQModifier(config_groups={"group_0": {"targets": ["Linear"], "weights": weights}}, ignore=["lm_head"])]


def awq():
    from llmcompressor.modifiers.transform.awq import AWQModifier

    return [AWQModifier(), QuantizationModifier(targets="Linear", scheme="W4A16_ASYM", ignore=["lm_head"])]


def fp8_kv():
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    return [QuantizationModifier(targets="Linear", scheme="FP8", ignore=["lm_head"], kv_cache_scheme=cache)]


def w4a8():
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    smooth = SmoothQuantModifier(smoothing_strength=0.8)
    return [smooth, QuantizationModifier(targets="Linear", scheme="W4A8", ignore=["lm_head"])]


def unpacked_by_the_tool(folder):
    """All weights, in BF16."""
    if not hasattr(ModelCompressor, "decompress"):
        dense = CompressedTensorsConfig(run_compressed=False)
        return AutoModelForCausalLM.from_pretrained(folder, quantization_config=dense).state_dict()
    # transformers 4.56 can't load what has an order; compressed-tensors 0.12.2 can.
    config = AutoConfig.from_pretrained(folder)
    compressor = ModelCompressor.from_compression_config(config.quantization_config)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    compressor.decompress(str(folder), model)
    return model.state_dict()


# Codes that are bytes belong to a smaller model.
SMALL = MODEL | {"intermediate_size": 128}
RECIPES = {"gptq-order": (gptq_order, MODEL), "awq": (awq, MODEL), "fp8-kv": (fp8_kv, SMALL), "w4a8": (w4a8, SMALL)}

for case in CASES:
    recipe, settings = RECIPES[case]
    folder = OUT / f"ct-llmc-{case}"
    model, _ = random_model(torch.bfloat16, settings)
    torch.manual_seed(5)
    tokens = torch.randint(0, settings["vocab_size"], (16, 32))
    data = Dataset.from_dict({"input_ids": tokens.tolist(), "attention_mask": torch.ones_like(tokens).tolist()})
    vocabulary = {str(token): token for token in range(settings["vocab_size"])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="0")), pad_token="0"
    )
    with tempfile.TemporaryDirectory() as dense:
        copy.deepcopy(model).to(torch.bfloat16).save_pretrained(dense)
        tokenizer.save_pretrained(dense)
        oneshot(model=dense, dataset=data, recipe=recipe(), output_dir=folder, max_seq_length=32,
                num_calibration_samples=len(tokens), shuffle_calibration_samples=False)  # fmt: skip
    for file in folder.iterdir():
        if file.name not in ["config.json", "model.safetensors", "recipe.yaml"]:
            file.unlink()
    weights = {name: torch.from_numpy(value) for name, value in decoded(folder).items()}
    peer = unpacked_by_the_tool(folder)
    for name, value in weights.items():
        assert torch.allclose(peer[name].float(), value, rtol=2**-7, atol=0), name
    write_expected(folder, model, weights)
