#!/usr/bin/env python3
"""Adapters as PEFT and mlx-lm write them, and the logits that these tools compute with them; and PEFT on ours.

  pip install torch==2.15.0 transformers==5.24.0 peft==0.21.2 'mlx[cpu]==0.32.4' 'mlx-lm==0.32.2'
  python peft_adapter.py tests/fixtures/adapters
  python peft_adapter.py --check DIR

Writes a folder for each adapter, and expected.safetensors:

  tokens        i32 [T]
  <case>        f32 [1, V], the logits behind the last token, with the adapter or adapters of that case

PEFT's are on assets/tiny, dequantized by mlx, in f32 by transformers; mlx-lm's on the packed models, floats upcast to f32.
`--check` reads adapters that candle-quant wrote: each folder in DIR is an adapter in PEFT's or mlx-lm's files, with
logits.safetensors (`tokens`, `logits_f32` [T, V]) beside; it fails if logits differ by 1e-3 standard deviations. The test
`what_is_saved_is_loaded_again` of crates/models writes them to CANDLE_QUANT_KEEP_ADAPTERS.
"""
import argparse
import json
import shutil
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
from mlx.utils import tree_flatten, tree_map
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters
from mlx_lm.utils import load_model
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).parents[2]
TINY = ROOT / "assets/tiny"
MOE = ROOT / "tests/fixtures/mlx/qwen3moe-affine-b4-g64"
TOKENS = load_file(ROOT / "tests/fixtures/tiny_logits.safetensors")["tokens"][:12]
MOE_TOKENS = TOKENS % 256
KEPT = 1

mx.set_default_device(mx.cpu)


def mlx_model(folder):
    """The model as mlx-lm runs it, floats upcast to f32."""
    model, _ = load_model(folder)
    floats = lambda v: v.astype(mx.float32) if mx.issubdtype(v.dtype, mx.floating) else v
    model.update(tree_map(floats, model.parameters()))
    return model


def transformers_model():
    """The bundled model, dequantized by mlx."""
    weights, stored = {}, dict(tree_flatten(mlx_model(TINY).parameters()))
    for name, value in stored.items():
        if name.endswith((".scales", ".biases")):
            continue
        module = name.removesuffix(".weight")
        if f"{module}.scales" in stored:
            value = mx.dequantize(value, stored[f"{module}.scales"], stored[f"{module}.biases"], 64, 4)
        weights[name] = torch.from_numpy(np.array(value))
    settings = json.loads((TINY / "config.json").read_text())
    for key in ["quantization", "quantization_config", "torch_dtype", "architectures", "model_type", "rope_scaling"]:
        settings.pop(key)
    rope = {"rope_type": "default", "rope_theta": settings.pop("rope_theta")}
    config = Qwen3Config(**settings, rope_parameters=rope, attn_implementation="eager")
    model = Qwen3ForCausalLM(config).float().eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and missing in ([], ["lm_head.weight"]), (missing, unexpected)
    model.tie_weights()
    return model


def torch_logits(model):
    with torch.no_grad():
        return model(TOKENS[None].long()).logits[0]


def deviation(logits, expected):
    return ((logits - expected).abs().max() / expected.std()).item()


def randomize(model, name):
    """Weights as a training might leave them."""
    for path, parameter in model.named_parameters():
        if f".{name}." in path and "lora_" in path:
            with torch.no_grad():
                if "magnitude" in path:
                    parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
                else:
                    parameter.copy_(0.08 * torch.randn_like(parameter))


PEFT = {
    "peft-lora": dict(r=2, lora_alpha=6, target_modules=r".*layers\.1\.(self_attn\.q_proj|mlp\.down_proj)"),
    "peft-rslora": dict(r=4, lora_alpha=3, use_rslora=True, target_modules=["v_proj"], layers_to_transform=[0]),
    "peft-dora": dict(r=2, lora_alpha=4, use_dora=True, target_modules=["o_proj", "k_proj"], layers_to_transform=[1]),
    "peft-patterns": dict(
        r=2,
        lora_alpha=4,
        target_modules=["k_proj", "v_proj", "q_proj"],
        layers_to_transform=[0],
        rank_pattern={"v_proj": 3, r"layers\.\d+\.self_attn\.[q]_proj": 1},
        alpha_pattern={"layers.0.self_attn.q_proj": 5, r"^model\.layers\.0\..*k_proj": 2.5},
    ),
}


def write_peft(out, expected):
    alone = torch_logits(transformers_model())
    for name, settings in PEFT.items():
        torch.manual_seed(len(expected))
        settings = {"lora_dropout": 0.05, "bias": "none", "task_type": "CAUSAL_LM", **settings}
        model = get_peft_model(transformers_model(), LoraConfig(**settings), adapter_name="default").eval()
        randomize(model, "default")
        model.save_pretrained(out / name)
        (out / name / "README.md").unlink()
        # As a user loads it.
        logits = torch_logits(PeftModel.from_pretrained(transformers_model(), out / name).eval())
        expected[name] = logits[-KEPT:].contiguous()
        print(f"{name}: {deviation(logits, alone):.2f} standard deviations from the model alone")
    model = PeftModel.from_pretrained(transformers_model(), out / "peft-lora", adapter_name="first")
    for name in ["dora", "patterns"]:
        model.load_adapter(out / f"peft-{name}", adapter_name=name)
    for case, names in [("peft-lora+peft-dora", ["first", "dora"]), ("peft-dora+peft-patterns", ["dora", "patterns"])]:
        model.base_model.set_adapter(names)
        expected[case] = torch_logits(model.eval())[-KEPT:].contiguous()


MLX = {
    "mlx-lora": (TINY, "lora", 1, {"rank": 2, "scale": 1.5, "dropout": 0.0, "keys": ["self_attn.v_proj", "mlp.up_proj"]}),
    "mlx-dora": (TINY, "dora", 1, {"rank": 2, "scale": 2.0, "dropout": 0.0, "keys": ["self_attn.k_proj"]}),
    "mlx-experts": (MOE, "lora", 1, {"rank": 2, "scale": 2.0, "dropout": 0.0, "keys": ["mlp.switch_mlp.gate_proj", "mlp.switch_mlp.down_proj", "mlp.gate"]}),
}


def mlx_logits(folder, adapter):
    model, tokens = load_adapters(mlx_model(folder), str(adapter)), TOKENS if folder == TINY else MOE_TOKENS
    return torch.from_numpy(np.array(model(mx.array(tokens.numpy())[None])[0].astype(mx.float32)))


def write_mlx(out, expected):
    for name, (folder, kind, layers, parameters) in MLX.items():
        mx.random.seed(len(expected))
        model = mlx_model(folder)
        linear_to_lora_layers(model, layers, parameters, use_dora=kind == "dora")
        leaves = {}
        for path, value in tree_flatten(model.parameters()):
            if path.endswith((".lora_a", ".lora_b")):
                leaves[path] = 0.08 * mx.random.normal(value.shape)
            elif path.endswith(".m"):
                leaves[path] = value * (1 + 0.2 * mx.random.normal(value.shape))
        if folder == MOE:  # halves the file
            leaves = {path: value.astype(mx.float16) for path, value in leaves.items()}
        (out / name).mkdir()
        mx.save_safetensors(str(out / name / "adapters.safetensors"), leaves)
        # What mlx_lm.lora writes beside it, without its options of training.
        config = {"fine_tune_type": kind, "num_layers": layers, "lora_parameters": parameters}
        (out / name / "adapter_config.json").write_text(json.dumps(config, indent=4))
        expected[name] = mlx_logits(folder, out / name)[-KEPT:].contiguous()


def check(folder):
    worst = 0
    for adapter in sorted(path.parent for path in folder.glob("*/logits.safetensors")):
        ours = load_file(adapter / "logits.safetensors")
        model, tokens = (MOE, MOE_TOKENS) if adapter.name.startswith("mlx-experts") else (TINY, TOKENS)
        assert ours["tokens"].tolist() == tokens.tolist(), "other tokens"
        if (adapter / "adapters.safetensors").is_file():
            logits = mlx_logits(model, adapter)
        else:
            logits = torch_logits(PeftModel.from_pretrained(transformers_model(), adapter).eval())
        found = deviation(ours["logits_f32"], logits)
        print(f"{adapter.name}: {found:.1e} standard deviations at most")
        worst = max(worst, found)
    assert 0 < worst, "no adapters there"
    sys.exit(worst > 1e-3)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("folder", type=Path, help="the folder to write, or to check")
parser.add_argument("--check", action="store_true", help="load adapters that candle-quant wrote")
args = parser.parse_args()
if args.check:
    check(args.folder)
shutil.rmtree(args.folder, ignore_errors=True)
args.folder.mkdir(parents=True)
expected = {"tokens": TOKENS}
write_peft(args.folder, expected)
write_mlx(args.folder, expected)
save_file(expected, args.folder / "expected.safetensors")
