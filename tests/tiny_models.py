"""Tiny random models of many architectures, and a tokenizer to go with them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB = 320
POSITIONS = 1024
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
# Sliding windows are 40 tokens: shorter than the prompts of the tests.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "mistral": {"model_type": "mistral", "sliding_window": 40},
    "qwen2": {"model_type": "qwen2"},
    "qwen2_sliding": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 40,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 24},
    "phi": {"model_type": "phi", "partial_rotary_factor": 0.5},
    "phi3": {"model_type": "phi3", "sliding_window": 40},
    "gemma": {"model_type": "gemma", "head_dim": 20, "num_key_value_heads": 1},
    "gemma2": {"model_type": "gemma2", "head_dim": 20, "sliding_window": 40},
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 20,
        "sliding_window": 40,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0, 1], "no_rope_layer_interval": 2},
    "stablelm": {"model_type": "stablelm", "partial_rotary_factor": 0.25},
    "olmo2": {"model_type": "olmo2"},
    "granite": {"model_type": "granite"},
}
ROPE_RANGE = 96  # original range of the two models whose rope changes with length
LENGTH_DEPENDENT: dict[str, dict[str, Any]] = {
    "dynamic": {
        "model_type": "llama",
        "max_position_embeddings": ROPE_RANGE,
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    },
    "longrope": {
        "model_type": "phi3",
        "max_position_embeddings": ROPE_RANGE * 4,
        "original_max_position_embeddings": ROPE_RANGE,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 8,
            "long_factor": [1.0 + 0.5 * i for i in range(8)],
        },
    },
}
_IS_4 = transformers.__version__.startswith("4.")


def tiny_model(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    """A random model of `name`; the same seed gives the same weights."""
    settings = {**BASE, **{**ARCHITECTURES, **LENGTH_DEPENDENT}[name], **changes}
    if _IS_4 and (rope := settings.pop("rope_parameters", None)) is not None:
        settings["rope_theta"] = rope["rope_theta"]
        settings["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
        settings["rope_scaling"]["type"] = settings["rope_scaling"].pop("rope_type")
    config = AutoConfig.for_model(**settings)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # peaked enough that greedy choices are no ties
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    model.generation_config.pad_token_id = 2
    return model.to(dtype).eval()


def long_model(architecture: str = "llama", **changes: Any) -> Any:
    """A tiny model for prompts of some thousand tokens."""
    return tiny_model(architecture, max_position_embeddings=4096, **changes)


def tiny_tokenizer() -> Any:
    """Bytes as tokens, a few special ones, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
    vocab = {token: index for index, token in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        additional_special_tokens=specials[3:],
        clean_up_tokenization_spaces=False,
        chat_template=(
            "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}"
        ),
    )


def random_ids(count: int, seed: int, *, low: int = 6, high: int = 250) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, (count,), generator=generator).tolist()
