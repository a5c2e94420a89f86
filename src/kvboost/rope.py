"""What a model's rotary embedding means for reuse: how far a cached prefix stays exact.

Rope types whose frequencies depend on the length of the sequence (dynamic, longrope) give a token
another key once the sequence outgrows the original range, so even a prefix is exact only inside
that range. Knows no cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvboost.compat import rotary_modules, text_config

GATED_REASON = "gated: rope changes with length"


def rope_parameter_sets(model: Any) -> list[dict[str, Any]]:
    """The model's rope parameters, one dict per set (some models have one per kind of layer)."""
    config = text_config(model)
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if parameters and all(isinstance(value, dict) for value in parameters.values()):
        return [dict(value) for value in parameters.values()]
    return [dict(parameters)]


def _rope_type(parameters: dict[str, Any]) -> str:
    return str(parameters.get("rope_type", parameters.get("type", "default")))


def exact_range_tokens(model: Any) -> int | None:
    """Longest sequence, answer included, over which cached KV stays exact; None = no such limit."""
    config = text_config(model)
    limits = []
    for parameters in rope_parameter_sets(model):
        kind = _rope_type(parameters)
        original = parameters.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if "dynamic" in kind:
            # transformers falls back to the original frequencies only strictly below the limit
            limits.append(int(original or config.max_position_embeddings) - 1)
        elif kind in ("longrope", "su"):
            limits.append(int(original or config.max_position_embeddings))
    return min(limits, default=None)


def max_positions(model: Any) -> int | None:
    """Longest sequence the model is made for; None = the config does not say."""
    config = text_config(model)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None:
        return None
    factors = [
        float(parameters.get("factor") or 1.0)
        for parameters in rope_parameter_sets(model)
        if "dynamic" in _rope_type(parameters)
    ]
    return int(limit * max(factors, default=1.0))


def reset_dynamic_frequencies(model: Any) -> None:
    """Put dynamic rope back to its original frequencies, as in a freshly loaded model.

    transformers keeps the frequencies of the longest sequence seen, so that the same prompt gives
    other tokens the second time. Starting from the original ones makes a prompt's answer its own.
    """
    for module in _dynamic_modules(model):
        names = [*vars(module), *module._buffers]  # a plain attribute or a buffer, by version
        for name in [name for name in names if name.endswith("original_inv_freq")]:
            prefix = name.removesuffix("original_inv_freq")
            current = getattr(module, f"{prefix}inv_freq")
            original = getattr(module, name).to(current.device).clone()
            module.register_buffer(f"{prefix}inv_freq", original, persistent=False)
            if hasattr(module, f"{prefix}max_seq_len_cached"):
                setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def _dynamic_modules(model: Any) -> Iterator[Any]:
    for _, module in rotary_modules(model):
        if "dynamic" in str(getattr(module, "rope_type", "")):
            yield module
