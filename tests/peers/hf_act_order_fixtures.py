#!/usr/bin/env python3
"""Tiny checkpoints whose columns are not in the order of their groups, each packed by the tool whose quant_method it names.

  pip install torch==2.15.0 transformers==5.23.0 compressed-tensors==0.12.2
  pip download --no-deps --no-binary :all: gptqmodel==7.7.0 && tar xf gptqmodel-7.7.0.tar.gz
  pip install accelerate device-smi logbar pypcre threadpoolctl
  python hf_act_order_fixtures.py gptqmodel-7.7.0 tests/fixtures/hf

compressed-tensors 0.12.2 is the last minor version of its kind that writes `weight_g_idx`; 0.20.0 has no such tensor any more. As in both
tools, columns are sorted by the square sums of their activations, the largest first, before groups are made, and codes are
stored in the order of x: layers with one input have one order. hf_model.py says what is in each folder. Weights are decoded by the
tools' own functions with scales in f32.
"""
import sys
from pathlib import Path

import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.compressors.quantized_compressors.pack_quantized import unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils.helpers import calculate_qparams
from hf_model import EXPERTS, packages, write

GPTQMODEL, OUT = map(Path, sys.argv[1:])
packages(GPTQMODEL, ["gptqmodel", "gptqmodel.nn_modules", "gptqmodel.models"])
sys.modules["gptqmodel"].DEBUG_ON = False
from gptqmodel.nn_modules.qlinear.torch import TorchLinear  # noqa: E402

# Activations of each input, which layers share.
INPUTS = {"q_proj": 1, "k_proj": 1, "v_proj": 1, "o_proj": 2, "gate_proj": 3, "up_proj": 3, "down_proj": 4}


def groups_of(module, k, group_size):
    """The columns in the order in which they are quantized, and the group of each."""
    # Each expert sees tokens of its own.
    expert = int(module.split(".experts.")[1].split(".")[0]) + 1 if ".experts." in module else 0
    torch.manual_seed(INPUTS[module.split(".")[-1]] + 10 * expert)
    activations = torch.randn(64, k) * torch.rand(k)
    order = torch.argsort(activations.square().sum(0), descending=True)
    groups = torch.arange(k, dtype=torch.int32) // group_size
    return order, groups[torch.argsort(order)]


def gptq(bits, group_size, checkpoint_format):
    def one(module, weight):
        if module.endswith("v_proj"):
            return None  # stays dense
        n, k = weight.shape
        order, index = groups_of(module, k, group_size)
        groups = weight.float()[:, order].reshape(n, -1, group_size)
        largest, low, high = 2**bits - 1, groups.amin(-1), groups.amax(-1)
        scales = ((high - low) / largest).half().float()
        # Zeros of v1 are stored less one: 0 is none of them.
        zeros = torch.clamp(-torch.round(low / scales), 1, largest)
        wide = lambda values: values[:, index.long()]  # noqa: E731
        codes = torch.clamp(torch.round(weight.float() / wide(scales)) + wide(zeros), 0, largest)
        rounded = (codes - wide(zeros)) * wide(scales)
        linear = torch.nn.Linear(k, n, bias=False)
        linear.weight.data = rounded
        layer = TorchLinear(bits, group_size, sym=False, desc_act=True, in_features=k, out_features=n, bias=False)
        layer.pack_original(linear, scales, zeros, index)
        layer.post_init()
        parts = {name: getattr(layer, name) for name in ["qweight", "qzeros", "scales", "g_idx"]}
        parts = {name: part.clone() for name, part in parts.items()}
        if checkpoint_format == "gptq":
            # convert_gptq_v2_to_v1_format of gptqmodel.utils.model: words are counted down as a whole.
            one_each = {3: [0b00100100100100100100100100100100, 0b10010010010010010010010010010010, 0b01001001001001001001001001001001]}
            one_each = one_each.get(bits, [sum(1 << at for at in range(0, 32, bits))])
            for first, word in enumerate(one_each):
                parts["qzeros"][:, first :: len(one_each)] -= torch.tensor(word).to(torch.int32)
        layer.scales = layer.scales.float()
        decoded = layer.dequantize_weight().t()
        assert torch.equal(decoded, rounded)
        return parts, decoded

    return one


def gptq_config(bits, group_size, checkpoint_format):
    settings = {"bits": bits, "group_size": group_size, "sym": False, "desc_act": True, "damp_percent": 0.01}
    return {"quant_method": "gptq", **settings, "checkpoint_format": checkpoint_format, "meta": {"quantizer": ["gptqmodel:7.7.0"]}}


def compressed(scheme):
    def one(module, weight):
        if module.endswith("v_proj"):
            return None
        n, k = weight.shape
        args = scheme.weights
        order, index = groups_of(module, k, args.group_size)
        groups = weight.float()[:, order].reshape(n, -1, args.group_size)
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
        compressor = PackedQuantizationCompressor()
        given = {"scale": scale.to(weight.dtype), "zero_point": zero, "g_idx": index}
        parts = compressor.compress_weight(weight, quantization_args=args, **given)
        parts = parts | {"weight_scale": given["scale"], "weight_g_idx": index}
        # As decompress_weight of other versions; that of this one does not get so far with zero points.
        codes = unpack_from_int32(parts["weight_packed"], args.num_bits, weight.shape)
        if not args.symmetric:
            shape = torch.Size(zero.shape)
            assert torch.equal(unpack_from_int32(parts["weight_zero_point"], args.num_bits, shape, packed_dim=0), zero)
        wide = {"zero_point": None if args.symmetric else zero, "g_idx": index, "args": args}
        decoded = dequantize(x_q=codes, scale=given["scale"].float(), **wide)
        return parts, decoded

    return one


def compressed_config(scheme):
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format="pack-quantized",
        ignore=["lm_head", "re:.*v_proj"],
        quantization_status="compressed",
    )
    return config.model_dump(mode="json")


for case, bits, group_size, checkpoint_format in [
    ("gptq-act-order-b4-g32", 4, 32, "gptq"),
    ("gptq-act-order-v2-b3-g64", 3, 64, "gptq_v2"),
]:
    config = gptq_config(bits, group_size, checkpoint_format)
    write(OUT / case, config, gptq(bits, group_size, checkpoint_format), dtype=torch.float16, tolerance=0.2)

config = gptq_config(4, 32, "gptq")
write(OUT / "gptq-act-order-experts", config, gptq(4, 32, "gptq"), dtype=torch.float16, tolerance=0.2, settings=EXPERTS)

for case, args in [
    ("ct-act-order-int4-g32", {"num_bits": 4, "group_size": 32, "symmetric": True}),
    ("ct-act-order-int8-asym-g64", {"num_bits": 8, "group_size": 64, "symmetric": False}),
]:
    args = QuantizationArgs(type="int", strategy="group", actorder="group", **args)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    write(OUT / case, compressed_config(scheme), compressed(scheme), dtype=torch.bfloat16)
