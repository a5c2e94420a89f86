"""A short run at load: does this model give the same answer from a cache in parts?

What fails here would give wrong tokens later, so the model is refused with the measured error. What a short
text cannot show is read off: a model whose own cache drops tokens that its masks show has no one answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from transformers import DynamicCache

from kvboost.compat import probing, text_config
from kvboost.errors import UnsupportedModelError
from kvboost.kernels.folded import FoldedAttention, can_fold
from kvboost.kernels.scope import forward_scope
from kvboost.kernels.windows import Windows, kept_by_own_cache, windows_now
from kvboost.kv.arena import Arena
from kvboost.kv.layout import KVLayout
from kvboost.run.packed_step import LOGIT_TOLERANCE, SMALL_WINDOW, trial_ids, trial_tokens


def check_exactness(model: Any, layout: KVLayout) -> None:
    """Compare logits of one forward with those of several over an arena, as requests run them."""
    learned = windows_now(model)
    if learned.is_otherwise:
        raise UnsupportedModelError(
            f"{type(model).__name__} may give other KV where a prompt is cut elsewhere: {learned.refusal}"
        )
    kept = [
        own if own is not None and own < learned.range_tokens else None for own in kept_by_own_cache(model)
    ]
    _check_own_cache(model, learned, kept)
    smallest_kept = min((own for own in kept if own is not None), default=None)
    tokens = trial_tokens(learned.smallest or smallest_kept)
    device = model.get_input_embeddings().weight.device
    ids = torch.from_numpy(trial_ids(model, tokens)).to(device).unsqueeze(0)
    differences = {}
    with probing(model, "checking that a cache in parts gives the same logits"):
        whole = model(input_ids=ids, use_cache=False).logits[0].float()
        with forward_scope(model, FoldedAttention()) if can_fold(model) else nullcontext():
            differences["a cache in parts"] = _difference(model, ids, whole, Arena(layout, tokens))
        if smallest_kept is not None and not learned.layers:  # masks that were not seen are tried
            own = DynamicCache(config=text_config(model))
            differences["the cache that it makes itself"] = _difference(model, ids, whole, own)
    tolerance = LOGIT_TOLERANCE.get(layout.slabs[0].dtype, 1e-1)
    for cache, difference in differences.items():
        if not difference <= tolerance:
            raise UnsupportedModelError(
                f"{type(model).__name__} does not give the same logits from {cache}: the relative "
                f"difference is {difference:.2g}, at most {tolerance:.0e} was expected"
            )


def _difference(model: Any, ids: torch.Tensor, whole: torch.Tensor, cache: Any) -> float:
    """How far logits over `cache` are from `whole` `[tokens, vocab]`, relatively.

    `ids` `[1, tokens]` go through in two blocks of several tokens, and the last two one by one.
    """
    tokens = ids.shape[1]
    cuts = [0, 9, tokens - 2, tokens - 1, tokens]
    parts = []
    for start, end in itertools.pairwise(cuts):
        output = model(input_ids=ids[:, start:end], past_key_values=cache, use_cache=True)
        parts.append(output.logits[0, -1].float())
    expected = whole[[end - 1 for end in cuts[1:]]]
    return float((torch.stack(parts) - expected).norm() / expected.norm().clamp_min(1e-6))


def _check_own_cache(model: Any, learned: Windows, kept: Sequence[int | None]) -> None:
    """Refuse a model whose own cache keeps fewer tokens (per layer) than its masks show, or may do so."""
    name = type(model).__name__
    smallest = min((own for own in kept if own is not None), default=None)
    if not learned.layers and smallest is not None and smallest > SMALL_WINDOW:
        raise UnsupportedModelError(
            f"{name} keeps the last {smallest} tokens in the cache that it makes itself, and whether its "
            f"masks show more cannot be seen: {learned.refusal}"
        )
    for layer, (seen, own) in enumerate(zip(learned.layers, kept, strict=False)):
        if own is not None and (seen is None or seen > own):
            raise UnsupportedModelError(
                f"{name} drops all but the last {own} tokens of layer {layer} while it generates, though its "
                f"masks show {'all' if seen is None else seen}: its answers depend on how a prompt is cut"
            )
