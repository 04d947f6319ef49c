#!/usr/bin/env python3
"""Changes configs of every family field by field, and compares what `candle-quant logits` and transformers make of them.

  pip install torch==2.15 transformers==5.23 safetensors
  python families_configs.py target/release/candle-quant tests/fixtures/families [FAMILY...]

Of FAMILY/hf/config.json, and of config_v4.json, each field is left out, and each of FOREIGN is set, one at a time. Where both
compute, logits have to be within 3e-4 standard deviations; either may refuse a config, but for what the CONTRADICTIONS say.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

torch.set_num_threads(1)
TOLERANCE = 3e-4
# They change no logits, or are in each config.
OTHERS = {
    "architectures", "bos_token_id", "dtype", "eos_token_id", "initializer_range", "model_type", "pad_token_id", "torch_dtype",
    "transformers_version", "use_cache", "vocab_size",
}
# Fields of some families, with values that would change something.
FOREIGN = {
    "alibi": True, "attention_bias": True, "attention_chunk_size": 2, "attention_multiplier": 0.5, "attention_out_bias": True,
    "attn_logit_softcapping": 3.0, "attn_output_gate": False, "attn_scale": 2.0, "attn_temperature_tuning": True, "clip_qkv": 0.05,
    "decoder_sparse_step": 2, "embedding_multiplier": 3.0, "final_logit_softcapping": 2.0, "first_k_dense_replace": 2,
    "floor_scale": 1, "full_attention_interval": 2, "head_dim": 4, "hidden_act": "gelu", "hidden_activation": "relu",
    "interleave_moe_layer_step": 2, "layer_norm_eps": 0.5, "layer_types": ["sliding_attention"] * 12,
    "linear_conv_kernel_dim": 2, "logit_scale": 0.5, "logits_scaling": 4.0, "max_window_layers": 0, "mlp_bias": True,
    "mlp_only_layers": [0], "moe_k": 1, "moe_layer_freq": 2, "moe_layer_start_index": 0, "n_group": 2, "no_rope_layer_interval": 2,
    "no_rope_layers": [0, 1, 0, 1], "norm_epsilon": 0.5, "norm_eps": 0.5, "norm_topk_prob": False, "num_experts_per_tok": 1,
    "partial_rotary_factor": 0.25, "qk_layernorm": True, "qkv_bias": True, "query_pre_attn_scalar": 9, "residual_multiplier": 0.5,
    "rms_norm_eps": 0.5, "rope_interleave": False, "rope_local_base_freq": 5.0, "rope_scaling": {"rope_type": "linear", "factor": 3.0},
    "rope_theta": 77.0, "rotary_pct": 0.2, "routed_scaling_factor": 7.0, "scoring_func": "softmax", "sliding_window": 3,
    "sliding_window_pattern": 2, "swiglu_limit": 0.1, "tie_word_embeddings": True, "topk_group": 1, "topk_method": "greedy",
    "use_bias": True, "use_parallel_residual": True, "use_qk_norm": False, "use_qkv_bias": True, "use_sliding_window": True,
}
# Configs that say two things, or what is not in the files.
CONTRADICTIONS = {
    (None, "+tie_word_embeddings"): "beside a stored head: transformers ties no weights that differ, mlx-lm and candle-quant do",
    ("ernie4_5_moe", "+num_experts_per_tok"): "beside `moe_k`, which it is another name of",
    ("hunyuan_v1_dense", "+use_qk_norm"): "beside stored norms: transformers has no model without, mlx-lm and llama.cpp have",
    ("olmo", "+layer_norm_eps"): "GGUF's: transformers has no such field",
}


def changed(config):
    fields = [key for key in config if key not in OTHERS]
    for key in fields:
        yield f"-{key}", {other: value for other, value in config.items() if other != key}
        if key in ("rope_parameters", "rope_scaling") and isinstance(config[key], dict):
            for part in config[key]:
                inner = {other: value for other, value in config[key].items() if other != part}
                yield f"-{key}.{part}", config | {key: inner}
    for key, value in FOREIGN.items():
        yield f"+{key}", config | {key: value}


def theirs(folder, tokens):
    """The logits of transformers; none if it refuses, or does not find its weights."""
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        if any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")):
            return None
        with torch.no_grad():
            return model.eval()(tokens[None], use_cache=False).logits[0].float()
    except Exception:  # noqa: BLE001
        return None


def ours(binary, folder, tokens):
    out = folder / "logits"
    ids = ",".join(map(str, tokens.tolist()))
    run = subprocess.run([binary, "logits", folder, "--tokens", ids, "--out", out], capture_output=True, text=True)
    if run.returncode not in (0, 1) or "panicked" in run.stderr:
        raise SystemExit(f"{folder}: {run.stderr}")
    return None if run.returncode else load_file(out)["logits"]


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("binary", type=Path, help="candle-quant")
parser.add_argument("fixtures", type=Path)
parser.add_argument("families", nargs="*")
args = parser.parse_args()
transformers.utils.logging.set_verbosity(50)
transformers.utils.logging.disable_progress_bar()
names = args.families or sorted(path.parent.name for path in args.fixtures.glob("*/hf"))
count, compared, failed = 0, 0, 0
for name in [name for name in names if name != "internlm3"]:  # of which transformers knows nothing
    folder = (args.fixtures / name / "hf").resolve()
    tokens = load_file(folder / "refs.safetensors")["tokens"].long()
    for file in ("config.json", "config_v4.json"):
        for change, config in changed(json.loads((folder / file).read_text())):
            with tempfile.TemporaryDirectory() as temporary:
                temporary = Path(temporary)
                os.symlink(folder / "model.safetensors", temporary / "model.safetensors")
                (temporary / "config.json").write_text(json.dumps(config))
                expected = theirs(temporary, tokens)
                found = None if expected is None else ours(args.binary.resolve(), temporary, tokens)
            count += 1
            if expected is None or found is None:
                continue
            compared += 1
            far = ((found - expected).abs().max() / expected.std()).item()
            if not far <= TOLERANCE:
                reason = CONTRADICTIONS.get((name, change)) or CONTRADICTIONS.get((None, change))
                failed += reason is None
                print(f"{name} {file} {change}: differ by {far:.2e} std{f' ({reason})' if reason else ''}", flush=True)
print(f"{count} configs, {compared} computed by both, {failed} wrong")
sys.exit(failed > 0)
