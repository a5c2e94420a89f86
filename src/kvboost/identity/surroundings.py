"""What changes the numbers of a forward beside the weights: adapters, the config and torch's settings.

Compared with each reading of a model. Knows models, no weights.
"""

from __future__ import annotations

from typing import Any

import torch

from kvboost.compat import comparable
from kvboost.identity.attention_name import own_name
from kvboost.identity.structure import ModelStructure

_ADAPTER_FIELDS = ("merged_adapters", "_active_adapter", "_disable_adapters", "scaling")
_VOLATILE_CONFIG = ("_name_or_path", "transformers_version", "_attn_implementation_autoset")


def surroundings_of(model: torch.nn.Module, structure: ModelStructure) -> tuple[Any, ...]:
    """Adapters, config and settings that change what the same weights compute."""
    return _adapter_states(structure.adapters), config_of(model), numerics(), structure.classes


def _adapter_states(layers: list[dict[str, Any]]) -> tuple[str, ...]:
    return tuple(str([each.get(name) for name in _ADAPTER_FIELDS]) for each in layers)


def config_of(model: Any) -> list[tuple[str, dict[str, Any]]]:
    """The fields of the model's configs, with the model's own attention, even while ours is in its place."""
    found = []
    config = getattr(model, "config", None)
    for each in _with_parts(config):
        fields = {
            name: type(value).__name__ if hasattr(value, "to_dict") else comparable(value)
            for name, value in vars(each).items()
            if name not in _VOLATILE_CONFIG
        }
        name = (
            "_attn_implementation_internal"
            if "_attn_implementation_internal" in fields
            else "_attn_implementation"
        )
        fields[name] = own_name(getattr(each, "_attn_implementation", None))
        found.append((type(each).__name__, fields))
    return found


def _with_parts(config: Any) -> list[Any]:
    if config is None or not hasattr(config, "to_dict"):
        return []
    parts = [
        value for value in vars(config).values() if hasattr(value, "to_dict") and hasattr(value, "__dict__")
    ]
    return [config, *parts]


def numerics() -> tuple[Any, ...]:
    """Settings of torch that change the numbers of a forward."""
    cuda = torch.backends.cuda.matmul
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # torch's newer settings are in use
        precision = str(getattr(cuda, "fp32_precision", ""))
    return (
        precision,
        cuda.allow_bf16_reduced_precision_reduction,
        cuda.allow_fp16_reduced_precision_reduction,
        torch.get_default_dtype(),
    )
