"""The families of tiny models that families_transformers.py and families_mlx.py write, in transformers 4 naming.

Each config is what a checkpoint of this family publishes: rope_theta, rope_scaling, partial_rotary_factor,
sliding_window_pattern at the top level. transformers 5 reads it and writes its own naming (rope_parameters,
layer_types); mlx-lm reads it as it is.

The sizes keep every file below 150 KB; the epsilons of the norms are larger than published ones (1e-3), so that they
matter.
"""
import copy
import json

TOKENS = [(37 * i + 5 * i * i + 3) % 96 for i in range(24)]
BASE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_theta": 1000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# for the mixtures of experts, whose files would be too large otherwise
NARROW = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
SLIDING, FULL = "sliding_attention", "full_attention"
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    "long_factor": [1.2, 1.7, 2.4, 3.1, 4.5, 6.0],
}
PHI3 = {"partial_rotary_factor": 0.75, "rope_scaling": LONGROPE, "tie_word_embeddings": True, "rms_norm_eps": 1e-3}
STABLELM = {
    "intermediate_size": 64,
    "partial_rotary_factor": 0.25,
    "layer_norm_eps": 1e-3,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 8,
    "beta_slow": 1,
}
MLA = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
}
GRANITE = {
    "rms_norm_eps": 1e-3,
    "logits_scaling": 1.5,
    "attention_multiplier": 0.4,
    "embedding_multiplier": 4.0,
    "residual_multiplier": 0.4,
    "attention_bias": False,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}

DELTA = {
    "rope_theta": None, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32, "head_dim": 16,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "attention_bias": False, "attn_output_gate": True, "rms_norm_eps": 1e-3,
    "hidden_act": "silu", "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
        "mrope_section": [1, 1, 0],
    },
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

# name: model_type, config
FAMILIES = {
    "llama": ("llama", {"rms_norm_eps": 1e-3, "rope_scaling": LLAMA3, "hidden_act": "silu", "tie_word_embeddings": False}),
    "mistral": ("mistral", {
        "head_dim": 32, "rms_norm_eps": 1e-3, "sliding_window": 6, "hidden_act": "silu", "tie_word_embeddings": False,
        "intermediate_size": 32,
    }),
    "qwen2": ("qwen2", {"rms_norm_eps": 1e-3, "hidden_act": "silu", "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {
        "head_dim": 32, "rms_norm_eps": 1e-3, "hidden_act": "silu", "tie_word_embeddings": True, "intermediate_size": 32,
    }),
    "mixtral": ("mixtral", NARROW | {
        "rms_norm_eps": 1e-3, "hidden_act": "silu", "tie_word_embeddings": False, "intermediate_size": 64,
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None,
    }),
    "qwen3_moe": ("qwen3_moe", {
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "rms_norm_eps": 1e-3, "hidden_act": "silu", "tie_word_embeddings": False,
        "intermediate_size": 64, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [0],
    }),
    "gpt_oss": ("gpt_oss", {
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "rms_norm_eps": 1e-3,
        "tie_word_embeddings": False, "intermediate_size": 32, "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 6, "layer_types": [SLIDING, FULL],
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 16,
        },
    }),
    "gemma": ("gemma", {
        "intermediate_size": 32, "head_dim": 32, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-3, "tie_word_embeddings": True,
    }),
    "gemma2": ("gemma2", {
        "head_dim": 32, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-3, "tie_word_embeddings": True,
        "intermediate_size": 32, "sliding_window": 6, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    }),
    "gemma3_text": ("gemma3_text", {
        "head_dim": 32, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-3, "tie_word_embeddings": True,
        "intermediate_size": 32, "sliding_window": 6, "sliding_window_pattern": 2, "query_pre_attn_scalar": 24,
        "rope_local_base_freq": 100.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }),
    "phi": ("phi", {
        "hidden_act": "gelu_new", "partial_rotary_factor": 0.5, "layer_norm_eps": 1e-3, "qk_layernorm": False,
        "tie_word_embeddings": False,
    }),
    "phi3": ("phi3", PHI3 | {"original_max_position_embeddings": 16}),
    "phi3-short": ("phi3", PHI3 | {"original_max_position_embeddings": 32}),
    "phi3-plain": ("phi3", {
        "rope_scaling": None, "original_max_position_embeddings": 128, "sliding_window": 6, "rms_norm_eps": 1e-3,
        "tie_word_embeddings": False,
    }),
    "olmo": ("olmo", {"clip_qkv": 1.0, "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False}),
    "olmo2": ("olmo2", {
        "intermediate_size": 64, "hidden_act": "silu", "rms_norm_eps": 1e-3, "tie_word_embeddings": False,
        "attention_bias": False,
    }),
    "smollm3": ("smollm3", {
        "num_hidden_layers": 3, "intermediate_size": 32, "no_rope_layers": [1, 0, 1], "no_rope_layer_interval": 4,
        "hidden_act": "silu", "rms_norm_eps": 1e-3, "tie_word_embeddings": True, "use_sliding_window": False,
        "sliding_window": None, "attention_bias": False, "mlp_bias": False,
    }),
    "glm4": ("glm4", {
        "intermediate_size": 64, "head_dim": 16, "partial_rotary_factor": 0.5, "attention_bias": True,
        "rms_norm_eps": 1e-3, "hidden_act": "silu", "tie_word_embeddings": False,
    }),
    "granite": ("granite", GRANITE | {"intermediate_size": 64, "mlp_bias": False}),
    "cohere": ("cohere", {
        "use_qk_norm": True, "layer_norm_eps": 1e-3, "logit_scale": 0.6, "attention_bias": False,
        "hidden_act": "silu", "tie_word_embeddings": True,
    }),
    "cohere2": ("cohere2", {
        "num_hidden_layers": 3, "intermediate_size": 32, "head_dim": 16, "layer_norm_eps": 1e-3, "logit_scale": 0.6,
        "attention_bias": False, "hidden_act": "silu", "sliding_window": 6, "sliding_window_pattern": 3,
        "tie_word_embeddings": True,
    }),
    "starcoder2": ("starcoder2", {
        "hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-3, "use_bias": True, "sliding_window": 6,
        "tie_word_embeddings": True,
    }),
    "stablelm": ("stablelm", STABLELM | {"use_qkv_bias": True, "use_parallel_residual": False, "qk_layernorm": False}),
    "stablelm-parallel": ("stablelm", STABLELM | {
        "use_qkv_bias": False, "use_parallel_residual": True, "qk_layernorm": True,
    }),
    # transformers has no internlm3: its Llama, with the same weights and the same (dynamic) rope, stands for it
    "internlm3": ("internlm3", {
        "intermediate_size": 64, "head_dim": 16, "bias": False, "qkv_bias": False, "rms_norm_eps": 1e-3,
        "hidden_act": "silu", "rope_scaling": {"rope_type": "dynamic", "factor": 6.0}, "tie_word_embeddings": False,
        "architectures": ["InternLM3ForCausalLM"],
    }),
    "seed_oss": ("seed_oss", {
        "num_key_value_heads": 1, "intermediate_size": 32, "head_dim": 32, "attention_bias": True,
        "attention_out_bias": False, "mlp_bias": False, "rms_norm_eps": 1e-3, "hidden_act": "silu",
        "tie_word_embeddings": False, "attention_dropout": 0.0, "residual_dropout": 0.0,
        "rope_scaling": {"rope_type": "default"},
    }),
    "ernie4_5": ("ernie4_5", {
        "intermediate_size": 32, "head_dim": 32, "use_bias": False, "rms_norm_eps": 1e-3, "hidden_act": "silu",
        "tie_word_embeddings": True,
    }),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {
        "intermediate_size": 32, "head_dim": 32, "use_qk_norm": True, "attention_bias": False, "rms_norm_eps": 1e-3,
        "hidden_act": "silu", "tie_word_embeddings": True, "rope_theta": 1000.0,
        "rope_scaling": {
            "type": "dynamic", "alpha": 50.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
            "mscale_all_dim": 0.0,
        },
    }),
    "exaone4": ("exaone4", {
        "num_hidden_layers": 3, "intermediate_size": 32, "head_dim": 16, "rms_norm_eps": 1e-3, "hidden_act": "silu",
        "tie_word_embeddings": False, "sliding_window": 6, "sliding_window_pattern": "LG",
        "layer_types": [SLIDING, FULL, SLIDING],
        "rope_scaling": {
            "rope_type": "llama3", "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 32,
        },
    }),
    "ministral3": ("ministral3", {
        "rope_theta": None, "num_key_value_heads": 1, "intermediate_size": 32, "head_dim": 32, "rms_norm_eps": 1e-3,
        "hidden_act": "silu", "tie_word_embeddings": False, "sliding_window": None,
        "rope_parameters": {
            "type": "yarn", "rope_type": "yarn", "rope_theta": 1000.0, "factor": 16.0,
            "original_max_position_embeddings": 8, "beta_fast": 4.0, "beta_slow": 1.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
        },
    }),
    "glm": ("glm", {
        "num_key_value_heads": 1, "intermediate_size": 32, "head_dim": 32, "partial_rotary_factor": 0.5,
        "attention_bias": True, "rms_norm_eps": 1e-3, "hidden_act": "silu", "tie_word_embeddings": False,
    }),
    "helium": ("helium", {
        "intermediate_size": 64, "head_dim": 16, "attention_bias": False, "mlp_bias": False, "rms_norm_eps": 1e-3,
        "hidden_act": "silu", "tie_word_embeddings": False,
    }),
    "olmo3": ("olmo3", {
        "num_hidden_layers": 3, "intermediate_size": 32, "sliding_window": 6,
        "layer_types": [SLIDING, FULL, SLIDING], "rope_theta": 500000.0, "hidden_act": "silu", "rms_norm_eps": 1e-3,
        "tie_word_embeddings": False, "attention_bias": False,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "beta_fast": 8, "beta_slow": 1,
            "attention_factor": 1.2079441541679836,
        },
    }),
    "apertus": ("apertus", {
        "hidden_act": "xielu", "rms_norm_eps": 1e-3, "tie_word_embeddings": False, "attention_bias": False,
        "mlp_bias": False, "post_norm": False, "qk_norm": True,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 32,
        },
    }),
    "nemotron": ("nemotron", {
        "hidden_act": "relu2", "norm_eps": 1e-3, "partial_rotary_factor": 0.5, "attention_bias": False,
        "mlp_bias": False, "head_dim": 16, "tie_word_embeddings": False,
    }),
    "qwen2_moe": ("qwen2_moe", NARROW | {
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "num_experts": 6,
        "num_experts_per_tok": 2, "norm_topk_prob": False, "decoder_sparse_step": 1, "rms_norm_eps": 1e-3,
        "hidden_act": "silu", "tie_word_embeddings": False, "use_sliding_window": False, "sliding_window": 4096,
        "max_window_layers": 2,
    }),
    "granitemoe": ("granitemoe", GRANITE | {
        "num_hidden_layers": 1, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2,
    }),
    "glm4_moe": ("glm4_moe", NARROW | {
        "head_dim": 32, "partial_rotary_factor": 0.5, "attention_bias": True, "use_qk_norm": True,
        "moe_intermediate_size": 32, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "n_group": 2, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1, "rms_norm_eps": 1e-3, "hidden_act": "silu", "rope_scaling": None,
        "tie_word_embeddings": False,
    }),
    "olmoe": ("olmoe", NARROW | {
        "intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": False,
        "clip_qkv": None, "rms_norm_eps": 1e-3, "hidden_act": "silu", "tie_word_embeddings": False,
        "attention_bias": False,
    }),
    "ernie4_5_moe": ("ernie4_5_moe", {
        "hidden_size": 32, "use_bias": False, "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 32,
        "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 1, "moe_layer_interval": 1,
        "moe_use_aux_free": True, "rms_norm_eps": 1e-3, "hidden_act": "silu", "tie_word_embeddings": True,
        "head_dim": 16,
    }),
    "deepseek_v2": ("deepseek_v2", MLA | {
        "topk_method": "group_limited_greedy", "norm_topk_prob": False, "scoring_func": "softmax",
        "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.5},
    }),
    "deepseek_v3": ("deepseek_v3", MLA | {
        "topk_method": "noaux_tc", "norm_topk_prob": True, "scoring_func": "sigmoid",
        "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    }),
    "llama4_text": ("llama4_text", NARROW | {
        "num_hidden_layers": 4, "head_dim": 16, "intermediate_size": 32, "intermediate_size_mlp": 96,
        "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "moe_layers": [1, 3],
        "no_rope_layers": [1, 1, 1, 0], "use_qk_norm": True, "attention_chunk_size": 6,
        "attn_temperature_tuning": True, "floor_scale": 8, "attn_scale": 0.3, "attention_bias": False,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
    }),
    "llama4_text-dense": ("llama4_text", {
        "head_dim": 16, "intermediate_size": 32, "intermediate_size_mlp": 96, "num_local_experts": 1,
        "num_experts_per_tok": 1, "interleave_moe_layer_step": 0, "moe_layers": [], "no_rope_layers": [1, 0],
        "use_qk_norm": True, "attention_chunk_size": 64, "attn_temperature_tuning": False, "attention_bias": False,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True,
    }),
    "qwen3_next": ("qwen3_next", {
        "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32, "full_attention_interval": 2,
        "head_dim": 16, "partial_rotary_factor": 0.25, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_experts": 4,
        "num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": [1],
        "attention_bias": False, "rms_norm_eps": 1e-3, "hidden_act": "silu", "tie_word_embeddings": True,
    }),
    # the text parts of qwen3_5 and qwen3_5_moe; published configs have rope_parameters already
    "qwen3_5_text": ("qwen3_5_text", DELTA | {
        "num_hidden_layers": 3, "full_attention_interval": 3, "linear_key_head_dim": 8,
    }),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", DELTA | {
        "intermediate_size": None, "full_attention_interval": 2, "head_dim": 8, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 32,
    }),
}
# where the default seed, 20, leaves two logits too close to each other
SEEDS = {
    "mixtral": 21, "llama": 24, "qwen2": 21, "phi3-plain": 21, "olmo2": 21, "cohere": 21, "stablelm-parallel": 22, "internlm3": 21, "hunyuan_v1_dense": 22,
    "ministral3": 21, "olmo3": 21, "apertus": 22, "nemotron": 21, "deepseek_v2": 21,
}


def published(name):
    """The family's config.json in published naming."""
    model_type, own = FAMILIES[name]
    # a copy, because transformers changes the dictionaries inside
    config = copy.deepcopy(BASE | own | {"model_type": model_type, "torch_dtype": "bfloat16"})
    absent = ("rope_theta", "intermediate_size")
    return {key: value for key, value in config.items() if not (key in absent and value is None)}

# llama.cpp's converter leaves out what all published models have in common, or wants it: there the tiny models have it, too.
COMMON = {
    "cohere2": {"rotary_pct": 1.0},
    "deepseek_v2": {"rope_scaling": {"mscale": 0.707, "mscale_all_dim": 0.707}},
    "exaone4": {"rope_theta": 1e6, "rope_scaling": {"original_max_position_embeddings": 8192}},
    "gemma": {"rope_theta": 1e4},
    "gemma2": {"rope_theta": 1e4, "query_pre_attn_scalar": 32},
    "gemma3_text": {"query_pre_attn_scalar": 32},
    "glm": {"rope_theta": 1e4, "rms_norm_eps": 1e-5},
    "glm4_moe": {"num_nextn_predict_layers": 0},
    "hunyuan_v1_dense": {"rope_theta": 1e4, "max_position_embeddings": 32768},
    "llama": {"rope_theta": 5e5, "rope_scaling": {"original_max_position_embeddings": 8192}},
    "llama4_text": {"attention_chunk_size": 8192, "attn_scale": 0.1, "floor_scale": 8192},
    "mistral": {"sliding_window": None},
    "olmoe": {"rms_norm_eps": 1e-5},
    "phi": {"rope_theta": 1e4},
    "qwen3_moe": {"mlp_only_layers": []},
    "qwen3_next": {"mlp_only_layers": []},
    "smollm3": {"no_rope_layers": [1, 1, 1]},
    "stablelm": {"rope_theta": 1e4},
    "stablelm-parallel": {"rope_theta": 1e4},
    "starcoder2": {"sliding_window": 4096},
}


def config_of_gguf(family):
    """The config, in published naming, of what families_gguf.py makes of a folder."""
    config = json.loads((family / "hf/config_v4.json").read_text())
    for key, value in COMMON.get(family.name, {}).items():
        config[key] = config[key] | value if isinstance(value, dict) else value
    return config
