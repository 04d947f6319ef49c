#!/usr/bin/env python3
"""Tiny quantized checkpoints, each written by the tool whose quant_method it names.

  pip install torch==2.15.0 transformers==5.23.0 compressed-tensors==0.20.0 nvidia-modelopt==0.47.0 requests
  pip install 'mlx[cpu]==0.32.4' mlx-lm==0.32.2
  pip download --no-deps --no-binary :all: autoawq==0.2.9 && tar xf autoawq-0.2.9.tar.gz
  python hf_fixtures.py autoawq-0.2.9 tests/fixtures/hf

Of AutoAWQ only two files are used, for it does not run with these versions. Each folder gets

  config.json, model.safetensors  a Qwen3 of one layer with random weights, as published checkpoints look
  expected.json                   shape and SHA-256 (of little-endian F32) of every decoded tensor, by the peer's decoder
  refs.safetensors                tokens i32 [T] and logits_f32 [T, V] of transformers with these decoded tensors
"""
import hashlib
import json
import sys
import types
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam
from mlx_lm.utils import _transform_awq_weights
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor, e2m1_values
from safetensors.torch import save_file
from transformers import FineGrainedFP8Config, Qwen3Config, Qwen3ForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

AUTOAWQ, OUT = Path(sys.argv[1]), Path(sys.argv[2])
for name in ["awq", "awq.modules", "awq.modules.linear", "awq.utils"]:
    package = types.ModuleType(name)  # without running the package's __init__.py
    package.__path__ = [str(AUTOAWQ / name.replace(".", "/"))]
    sys.modules[name] = package
from awq.modules.linear.gemm import WQLinear_GEMM  # noqa: E402
from awq.utils.packing_utils import dequantize_gemm  # noqa: E402

e2m1_values[8] = -0.0  # the table of ModelOpt drops the sign

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


def random_model(dtype):
    torch.manual_seed(20)
    model = Qwen3ForCausalLM(Qwen3Config(**MODEL, attn_implementation="eager"))
    for name, value in model.state_dict().items():
        center = 1.0 if "norm" in name else 0.0
        value.copy_((torch.randn(value.shape) * 0.09 + center).to(dtype))
    return model.float(), {name: value.to(dtype) for name, value in model.state_dict().items()}


def is_linear(name):
    return name.endswith("_proj.weight")


def write(case, quantization_config, quantize_one, dtype=torch.bfloat16, beside=None):
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
            decoded[name] = parts[1].float()
            assert (decoded[name] - weight.float()).abs().max() < 0.08, name
    model.load_state_dict(decoded)
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0].float()
    folder = OUT / case
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
    print(f"{case}: {sum(f.stat().st_size for f in folder.iterdir())} bytes, logits {logits.std():.3f}")


def awq(group_size):
    def one(module, weight):
        if module.endswith("v_proj"):
            return None  # stays dense
        groups = weight.float().reshape(weight.shape[0], -1, group_size)
        low, high = groups.amin(-1), groups.amax(-1)
        scales = ((high - low) / 15).half()
        zeros = torch.clamp(-torch.round(low / scales), 0, 15)
        clipped = torch.clamp(torch.round(groups / scales.float()[..., None]) + zeros[..., None], 0, 15)
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight.data = ((clipped - zeros[..., None]) * scales.float()[..., None]).reshape(weight.shape)
        layer = WQLinear_GEMM.from_linear(
            linear, 4, group_size, scales=scales.float().t().contiguous(), zeros=zeros.t().contiguous()
        )
        parts = {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales}
        arrays = {f"m.{key}": mx.array(value.numpy()) for key, value in parts.items()}
        arrays = {key: value.view(mx.uint32) if "q" in key else value for key, value in arrays.items()}
        w, settings = _transform_awq_weights(arrays, {"bits": 4, "group_size": group_size})
        scales, biases = (w[f"m.{key}"].astype(mx.float32) for key in ("scales", "biases"))
        decoded = torch.from_numpy(np.array(mx.dequantize(w["m.weight"], scales, biases, **settings)))
        exact = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), 4, group_size).t()
        assert (decoded - exact).abs().max() <= 2**-11 * 15 * scales.max().item()
        return parts, decoded

    return one


def compressed(args, format):
    """By compressed-tensors' compressor; decoded by its own functions, in f32."""

    def one(module, weight):
        if module.endswith("v_proj"):
            return None
        groups = weight.float().reshape(weight.shape[0], -1, args.group_size)
        state = {"weight": weight}
        if format == "nvfp4-pack-quantized":
            state["weight_global_scale"] = generate_gparam(weight.amin().reshape(1), weight.amax().reshape(1))
        scale, zero_point = calculate_qparams(
            groups.amin(-1), groups.amax(-1), args, global_scale=state.get("weight_global_scale")
        )
        state.update(weight_scale=scale.to(weight.dtype), weight_zero_point=zero_point)
        scheme = QuantizationScheme(targets=["Linear"], weights=args, format=format)
        parts = BaseCompressor.get_value_from_registry(format).compress(state, scheme)
        if format == "pack-quantized":
            codes = unpack_from_int32(parts["weight_packed"], 4, weight.shape).float()
            return parts, dequantize(codes, parts["weight_scale"].float(), args=args)
        codes = unpack_fp4_from_uint8(parts["weight_packed"], *weight.shape, dtype=torch.float32)
        if format == "mxfp4-pack-quantized":
            return parts, dequantize(codes, decompress_mx_scale(parts["weight_scale"]).float(), args=args)
        scale, global_scale = parts["weight_scale"].float(), parts["weight_global_scale"]
        peer = dequantize(codes, scale, args=args, global_scale=global_scale)
        # The peer divides each scale; the multiplier is defined as the rounded reciprocal.
        decoded = codes * (scale * (1 / global_scale)).repeat_interleave(args.group_size, 1)
        assert torch.allclose(decoded, peer, rtol=2**-22, atol=0)
        return parts, decoded

    return one


def modelopt(module, weight):
    if module.endswith("v_proj"):
        return None
    tensor, scale, scale_2 = NVFP4QTensor.quantize(weight.float(), 16)
    parts = {"weight": tensor._quantized_data, "weight_scale": scale, "weight_scale_2": scale_2}
    decoded = tensor.dequantize(torch.float32, scale=scale, double_scale=scale_2, block_sizes={-1: 16})
    return dict(parts, input_scale=torch.tensor(0.01)), decoded


def fp8(config):
    quantizer = types.SimpleNamespace(quantization_config=config)

    def one(module, weight):
        parts = Fp8Quantize(quantizer).convert({f"{module}.weight": weight})
        if len(parts) == 1:
            return None  # no whole tiles
        parts = {key.removeprefix(f"{module}."): value for key, value in parts.items()}
        scale = parts["weight_scale_inv"]
        return parts, Fp8Dequantize(quantizer)._dequantize_one(parts["weight"], scale, torch.float32)

    return one


def compressed_config(scheme, format):
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=format, ignore=["lm_head", "re:.*v_proj"], quantization_status="compressed"
    )
    return config.model_dump(mode="json")


write(
    "awq-g64",
    {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 64,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["v_proj"],
    },
    awq(64),
    dtype=torch.float16,
)
for case, preset, format, changes in [
    ("ct-int4-g32", "W4A16", "pack-quantized", {"group_size": 32}),
    ("ct-int4-g128-f32", "W4A16", "pack-quantized", {}),
    ("ct-nvfp4", "NVFP4A16", "nvfp4-pack-quantized", {}),
    ("ct-mxfp4", "MXFP4A16", "mxfp4-pack-quantized", {}),
]:
    scheme = preset_name_to_scheme(preset, ["Linear"])
    scheme.weights = scheme.weights.model_copy(update=changes)
    dtype = torch.float32 if case.endswith("f32") else torch.bfloat16
    write(case, compressed_config(scheme, format), compressed(scheme.weights, format), dtype=dtype)
MODELOPT = {
    "quant_algo": "NVFP4",
    "kv_cache_quant_algo": None,
    "group_size": 16,
    "exclude_modules": ["lm_head", "model.layers.0.self_attn.v_proj"],
}
producer = {"name": "modelopt", "version": "0.47.0"}
write("modelopt-nvfp4", None, modelopt, beside={"hf_quant_config.json": {"producer": producer, "quantization": MODELOPT}})
for case, block, scale_fmt in [("fp8-128x128", [128, 128], "float"), ("fp8-ue8m0-32x32", [32, 32], "ue8m0")]:
    config = FineGrainedFP8Config(weight_block_size=block, scale_fmt=scale_fmt)
    stated = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": block}
    if scale_fmt == "ue8m0":
        stated["scale_fmt"] = scale_fmt
    write(case, stated, fp8(config))
