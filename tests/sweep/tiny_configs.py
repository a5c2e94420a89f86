"""A tiny configuration for every causal LM that the installed transformers knows.

Configurations name their sizes alike, so one table of small values by name serves most of them; what does
not fit is changed type by type in `OVERRIDES`. Sliding windows are 40 tokens: shorter than most prompts.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB = 320
WINDOW = 40
LAYERS = 4
HEADS = 4
KV_HEADS = 2
WIDTH = 64
HEAD_DIM = 16
EXPERTS = 4

# By name, the small value of a size. A name that a configuration does not have is left out.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "n_positions": 1024,
    "max_seq_len": 1024,
    "context_length": 1024,
    # width
    "hidden_size": WIDTH,
    "n_embd": WIDTH,
    "d_model": WIDTH,
    "emb_dim": WIDTH,
    "embedding_size": WIDTH,
    "embedding_dim": WIDTH,
    "word_embed_proj_dim": WIDTH,
    "input_embedding_size": WIDTH,
    "output_embedding_size": WIDTH,
    "attention_hidden_size": WIDTH,
    # depth
    "num_hidden_layers": LAYERS,
    "n_layer": LAYERS,
    "n_layers": LAYERS,
    "num_layers": LAYERS,
    "num_blocks": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_layers": LAYERS,
    "num_decoder_layers": LAYERS,
    "num_encoder_layers": LAYERS,
    # heads
    "num_attention_heads": HEADS,
    "n_head": HEADS,
    "n_heads": HEADS,
    "num_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_attention_heads": HEADS,
    "num_decoder_attention_heads": HEADS,
    "num_encoder_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_kv_heads": KV_HEADS,
    "num_query_groups": KV_HEADS,
    "head_dim": HEAD_DIM,
    "dim_head": HEAD_DIM,
    "d_head": HEAD_DIM,
    "kv_channels": HEAD_DIM,
    "rotary_dim": 8,
    # feed-forward
    "intermediate_size": 96,
    "ffn_dim": 96,
    "n_inner": 96,
    "dff": 96,
    "dim_ff": 96,
    "d_inner": 96,
    "feed_forward_size": 96,
    "ffn_hidden_size": 96,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "intermediate_size_mlp": 96,
    "dense_intermediate_size": 96,
    "shared_intermediate_size": 48,
    "moe_intermediate_size": 48,
    "expert_ffn_hidden_size": 48,
    "shared_expert_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 48,
    # experts
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "n_group": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    # latent attention
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    # attention that chooses its keys
    "index_topk": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 2,
    "indexer_head_dim": 16,
    # windows, switched on where they can be
    "sliding_window": WINDOW,
    "sliding_window_size": WINDOW,
    "attention_window_size": WINDOW,
    "window_size": WINDOW,
    "local_attention": 2 * WINDOW,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "attention_chunk_size": WINDOW,
    # state spaces and linear attention
    "state_size": 8,
    "time_step_rank": 8,
    "mamba_d_state": 8,
    "mamba_state_dim": 8,
    "ssm_state_size": 8,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_headdim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_num_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_head_dim": 16,
    "lru_width": WIDTH,
    # special tokens
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
# Lists with one entry per layer: as many as there are layers, with every kind that the default has.
PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "attention_layers", "block_types")
_MIXED = ["sliding_attention", "full_attention"] * 2
_GEMMA_4 = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
OVERRIDES: dict[str, dict[str, Any]] = {
    "blt": {
        "encoder_hash_byte_group_vocab": 500,
        "encoder_config": {"hidden_size_global": WIDTH},
        "decoder_config": {"hidden_size_global": WIDTH},
    },
    "cohere_compass_text": {
        "layer_types": _MIXED,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
            "full_attention": None,
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": KV_HEADS, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": EXPERTS, "moe_top_k": 2},
    },
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": {
        "layer_types": _MIXED,
        "num_kv_shared_layers": 2,
        "intermediate_size": [96] * LAYERS,
        "activation_sparsity_pattern": [0.0] * LAYERS,
        "laurel_rank": 8,
        **_GEMMA_4,
    },
    "gemma4": {"text_config": _GEMMA_4},
    "gemma4_text": _GEMMA_4,
    "laguna": {"layer_types": _MIXED},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"head_dim": 8, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "n_groups": 2},
    "mellum": {"layer_types": _MIXED},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "index_block_size": 8,
        "index_topk_blocks": 2,
        "index_n_heads": KV_HEADS,
    },
    "ministral3": {  # queries grow with their position, behind the first 64
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 64,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "qwen4_exp": {"text_config": {"indexer_budget": 16, "indexer_compress_ratio": 4, "indexer_kv_heads": 1}},
    "qwen4_exp_text": {"indexer_budget": 16, "indexer_compress_ratio": 4, "indexer_kv_heads": 1},
    "reformer": {
        "axial_pos_embds_dim": [16, 48],
        "attn_layers": ["local", "lsh"] * 2,
        "attention_head_size": 16,
    },
    "roc_bert": {"pronunciation_vocab_size": VOCAB, "shape_vocab_size": VOCAB},
    "smollm3": {"layer_types": _MIXED},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 2 * WIDTH, "attention_head_dim": 2 * HEAD_DIM},
    "zamba2": {"attention_hidden_size": 2 * WIDTH, "attention_head_dim": 2 * HEAD_DIM},
    "zaya": {"num_experts_per_tok": 1},
}


def model_types() -> list[str]:
    """Every model type with a causal LM, sorted."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def class_name(model_type: str) -> str:
    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def tiny_config(model_type: str, **changes: Any) -> Any:
    """The configuration of a tiny model of this type, with `changes`."""
    kind = CONFIG_MAPPING[model_type]
    overrides = {**OVERRIDES.get(model_type, {}), **changes}
    return kind(**_merged(_shrunk(kind()), overrides))


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with `changes`, those of its parts included."""
    parts = {
        name: _merged(base[name], value)
        for name, value in changes.items()
        if isinstance(value, dict) and isinstance(base.get(name), dict)
    }
    return {**base, **changes, **parts}


def _shrunk(default: Any) -> dict[str, Any]:
    """Small values for what a default configuration has; its parts are shrunk alike."""
    fields = default.to_dict()
    small = {name: SIZES[name] for name in SIZES if name in fields}
    for name in PER_LAYER:
        kinds = list(dict.fromkeys(fields.get(name) or ()))
        if len(kinds) > 1 or (kinds and "max_window_layers" not in fields):
            small[name] = [kinds[layer % len(kinds)] for layer in range(LAYERS)]
    if "kv_lora_rank" in fields:  # every head has its own keys, made from what they share
        small["num_key_value_heads"] = HEADS
        small.pop("head_dim", None)
    if "is_decoder" in fields and not fields.get("is_encoder_decoder"):
        small["is_decoder"] = True
    for name in default.sub_configs:
        if (part := getattr(default, name, None)) is not None:
            small[name] = {"model_type": part.model_type, **_shrunk(part)}
    return small


def build(model_type: str, seed: int = 0, **changes: Any) -> Any:
    """A random model of this type, in float32 and eval mode, peaked so that greedy choices are no ties."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    return model.float().eval()
