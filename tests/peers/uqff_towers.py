"""Models that mistral.rs has with a tower for images alone, for families_uqff.py: towers of no layers."""
from dataclasses import dataclass


@dataclass
class Tower:
    model_type: str
    # What the config has beside that of the text.
    config: dict
    # What stands before the names of the text's tensors and of its head.
    text: str
    head: str
    # The tensors of the tower.
    tensors: dict


PROCESSOR = {
    "image_token": "<90>", "image_break_token": "<91>", "image_end_token": "<92>", "patch_size": 2, "spatial_merge_size": 2,
}
LANGUAGE_MODEL = {"text": "language_model.model.", "head": "language_model.lm_head."}


def llama4(hidden_size):
    vision = {
        "hidden_size": 4, "hidden_act": "gelu", "num_hidden_layers": 0, "num_attention_heads": 1, "num_channels": 3,
        "intermediate_size": 16, "vision_output_dim": 4, "image_size": 4, "patch_size": 2, "norm_eps": 1e-5,
        "pixel_shuffle_ratio": 0.5, "projector_input_dim": 4, "projector_output_dim": 4, "vision_feature_layer": -1,
        "rope_theta": 10000.0,
    }
    tensors = {
        "multi_modal_projector.linear_1.weight": (hidden_size, 4),
        "vision_model.patch_embedding.linear.weight": (4, 12),
        "vision_model.class_embedding": (4,),
        "vision_model.positional_embedding_vlm": (5, 4),
        "vision_model.layernorm_pre.weight": (4,),
        "vision_model.layernorm_pre.bias": (4,),
        "vision_model.layernorm_post.weight": (4,),
        "vision_model.layernorm_post.bias": (4,),
        "vision_model.vision_adapter.mlp.fc1.weight": (4, 16),
        "vision_model.vision_adapter.mlp.fc2.weight": (4, 4),
    }
    return Tower("llama4", {"vision_config": vision, "image_token_index": 90}, **LANGUAGE_MODEL, tensors=tensors)


def mistral3(hidden_size):
    vision = {
        "hidden_size": 4, "image_size": 4, "patch_size": 2, "num_hidden_layers": 0, "num_attention_heads": 1,
        "head_dim": 4, "intermediate_size": 4,
    }
    config = {
        "vision_config": vision, "image_token_index": 90, "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu", "spatial_merge_size": 2, "vision_feature_layer": -1,
    }
    tensors = {
        "vision_tower.patch_conv.weight": (4, 3, 2, 2),
        "vision_tower.ln_pre.weight": (4,),
        "multi_modal_projector.norm.weight": (4,),
        "multi_modal_projector.linear_1.weight": (hidden_size, 4),
        "multi_modal_projector.linear_2.weight": (hidden_size, hidden_size),
        "multi_modal_projector.patch_merger.merging_layer.weight": (4, 16),
    }
    return Tower("mistral3", config, **LANGUAGE_MODEL, tensors=tensors)


def qwen3_5(model_type, hidden_size):
    vision = {
        "depth": 0, "hidden_size": 4, "out_hidden_size": hidden_size, "intermediate_size": 4, "num_heads": 1,
        "patch_size": 2, "num_position_embeddings": 4, "deepstack_visual_indexes": [],
    }
    tokens = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
    tensors = {
        "patch_embed.proj.weight": (4, 3, 2, 2, 2),
        "patch_embed.proj.bias": (4,),
        "pos_embed.weight": (4, 4),
        "merger.norm.weight": (4,),
        "merger.norm.bias": (4,),
        "merger.linear_fc1.weight": (16, 16),
        "merger.linear_fc1.bias": (16,),
        "merger.linear_fc2.weight": (hidden_size, 16),
        "merger.linear_fc2.bias": (hidden_size,),
    }
    tensors = {"model.visual." + name: shape for name, shape in tensors.items()}
    return Tower(model_type, {"vision_config": vision} | tokens, "model.language_model.", "lm_head.", tensors)


TOWERS = {
    "llama4_text": llama4(32),
    "llama4_text-dense": llama4(64),
    "ministral3": mistral3(64),
    "qwen3_5_moe_text": qwen3_5("qwen3_5_moe", 64),
    "qwen3_5_text": qwen3_5("qwen3_5", 64),
}
