"""Which models and library versions kvboost works with, and how they are told apart.

Every question about the installed transformers, about an architecture's name and about the
device is answered here (cache layer signatures: arena.py). Knows no cache and no engine.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from packaging.version import Version

from kvboost.errors import UnsupportedModelError

TRANSFORMERS_VERSION = Version(transformers.__version__)
# From 5.0 on `crop(0)` leaves the cache as it is; before, it was an absolute length of zero.
CROP_ZERO_EMPTIES = Version("5.0.0.dev0") > TRANSFORMERS_VERSION
# From 5.0 on assisted decoding feeds the whole prompt to a cache that holds a part of it already.
ASSISTED_FEEDS_WHOLE_PROMPT = not CROP_ZERO_EMPTIES

SUPPORTED_ARCHITECTURES: frozenset[str] = frozenset(
    f"{name}ForCausalLM"
    for name in (
        "Gemma",
        "Gemma2",
        "Gemma3",
        "Granite",
        "InternLM",
        "InternLM2",
        "Llama",
        "Mistral",
        "Olmo2",
        "Phi",
        "Phi3",
        "Qwen2",
        "Qwen2_5",
        "Qwen3",
        "SmolLM3",
        "StableLm",
    )
)

_ALIBI = "uses ALiBi position biases instead of RoPE, so its keys cannot be moved"
_ABSOLUTE = "uses learned absolute positions instead of RoPE, so its keys cannot be moved"
UNSUPPORTED_ARCHITECTURES: dict[str, str] = {
    "BloomForCausalLM": _ALIBI,
    "FalconForCausalLM": _ALIBI,
    "MPTForCausalLM": _ALIBI,
    "MptForCausalLM": _ALIBI,
    "GPT2LMHeadModel": _ABSOLUTE,
    "GPTNeoForCausalLM": _ABSOLUTE,
    "GPTNeoXForCausalLM": "is rotary, but position ids may not be honoured",
}

_STATE_LAYERS = ("linear_attention", "mamba", "conv", "hybrid", "recurrent", "moe_mamba")
_STATE_FIELDS = (
    "ssm_cfg",
    "state_size",
    "mamba_d_state",
    "mamba_state_dim",
    "ssm_state_size",
    "rwkv_version",
)


def architecture_of(model: Any) -> str:
    """Name of the model's architecture, as in its config, else of its class."""
    names = getattr(model.config, "architectures", None)
    class_name = type(model).__name__
    if class_name in SUPPORTED_ARCHITECTURES or class_name in UNSUPPORTED_ARCHITECTURES or not names:
        return class_name
    return str(names[0])


def text_config(model: Any) -> Any:
    """The configuration of the language model itself (of several, the text one)."""
    return model.config.get_text_config(decoder=True)


def structural_refusal(model: Any) -> str | None:
    """Why this kind of model has no KV that could be reused, or None."""
    config = text_config(model)
    if getattr(model.config, "is_encoder_decoder", False):
        return "is an encoder-decoder model; kvboost reuses the KV of decoder-only models"
    layer_types = {str(kind) for kind in (getattr(config, "layer_types", None) or ())}
    if any(word in kind for kind in layer_types for word in _STATE_LAYERS):
        return "has state-space or linear-attention layers, whose state is not a KV cache"
    if any(getattr(config, name, None) is not None for name in _STATE_FIELDS):
        return "is a state-space model, whose state is not a KV cache"
    if getattr(config, "num_kv_shared_layers", None):
        return "shares KV between layers, so layers cannot be stored one by one"
    if "chunked_attention" in layer_types or getattr(config, "attention_chunk_size", None):
        return "uses chunked attention, where KV depends on how the prompt is cut"
    return None


def comparable(value: Any) -> Any:
    """A value of a config, so that equal ones compare equal; what has none is known by identity."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")  # configs name it either way
    if isinstance(value, (list, tuple, set, frozenset)):
        return [comparable(each) for each in value]
    if isinstance(value, dict):
        return {str(key): comparable(each) for key, each in value.items()}
    return type(value).__name__, id(value)


def rotary_modules(model: Any) -> list[tuple[str, torch.nn.Module]]:
    """The model's rotary embedding modules, by name."""
    return [(name, module) for name, module in model.named_modules() if "Rotary" in type(module).__name__]


@contextmanager
def eval_mode(model: Any) -> Iterator[None]:
    """Inside, every submodule is in eval mode; afterwards each has the flag that it had before."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def probing(model: Any, doing: str) -> Iterator[None]:
    """Run a model for the first time: in eval mode, without gradients; what it raises becomes a refusal.

    Running out of memory says nothing about the model, and stays what it is.
    """
    try:
        with eval_mode(model), torch.no_grad():
            yield
    except UnsupportedModelError:
        raise
    except Exception as error:
        if _is_out_of_memory(error):
            raise
        raise UnsupportedModelError(
            f"{type(model).__name__} failed while {doing}: {type(error).__name__}: {error}"
        ) from error


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    words = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def check_model_compatibility(model: Any, strict: bool = True) -> None:
    """Check that the KV of `model` can be reused.

    Raises UnsupportedModelError (a ValueError) for a known-incompatible architecture and warns
    about an untested one. With `strict=False` it only warns.
    """
    name = architecture_of(model)
    reason = structural_refusal(model) or UNSUPPORTED_ARCHITECTURES.get(name)
    if reason is None and not rotary_modules(model):
        reason = "has no rotary position embedding (RoPE)"
    if reason is not None:
        message = f"{name} {reason}"
        if strict:
            raise UnsupportedModelError(f"{message}; pass strict=False to try it with exact reuse only")
        warnings.warn(message, UserWarning, stacklevel=2)
    elif name not in SUPPORTED_ARCHITECTURES:
        warnings.warn(f"{name} is not among the tested architectures", UserWarning, stacklevel=2)


def choose_device() -> torch.device:
    """cuda before mps before cpu."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def mask_function(implementation: str) -> Any:
    """transformers' function that makes masks for an attention implementation; sdpa's for one without."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    known = implementation in ALL_MASK_ATTENTION_FUNCTIONS
    return ALL_MASK_ATTENTION_FUNCTIONS[implementation if known else "sdpa"]


def attention_function(implementation: str) -> Any:
    """transformers' own function of an attention implementation."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS[implementation]
