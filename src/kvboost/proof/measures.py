"""What checks share: what they say, what they compare with, and how far off numbers are and may be.

Compared with are texts, and their KV and logits by the stock model. Knows no part of the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, LogitsProcessor

from kvboost.kv import rope
from kvboost.kv.arena import Arena
from kvboost.kv.layout import KVLayout
from kvboost.models import PastKVType
from kvboost.proof.documents import plain_text
from kvboost.proof.fresh_engine import Verifiable
from kvboost.run import decode

EXACT, QUANTIZED, APPROXIMATE = "exact", "quantized", "approximate"
PROBE_TOKENS = 180
# Settings under which stored KV is what the model computed, cut at equal sizes.
PLAIN: dict[str, Any] = {"kv_cache_bits": 16, "overlap_k": 0, "sink_tokens": 0, "chunk_boundary_window": 0}
# How far from the stock model's numbers exact ones may be: relative norms, by type.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6, torch.float16: 3e-2, torch.bfloat16: 1e-1}
# Mean divergence (nats) from full prefill that each kind of reuse may have; half precision adds its noise.
_EXACT_KL = {torch.float32: 1e-4, torch.float64: 1e-6}
_HALF_KL = 0.02
_QUANTIZED_KL: dict[object, float] = {8: 0.01, "k8v4": 0.05, 4: 0.1}
_APPROXIMATE_KL = 0.1


@dataclass(frozen=True)
class Check:
    """One part of the engine; `passed` is None where it was not judged, and `detail` says why or how far off.

    `kind` is the kind of reuse that stands or falls with it.
    """

    name: str
    kind: str
    passed: bool | None
    detail: str = ""
    value: float | None = None
    bound: float | None = None


def max_kl(engine: Verifiable, kind: str) -> float:
    """Mean divergence in nats that this kind of reuse may have."""
    exact = _EXACT_KL.get(engine.model.dtype, _HALF_KL)
    if kind == EXACT:
        return exact
    bits = engine.kv_cache_bits if engine.is_quantized else 8
    return max(exact, _QUANTIZED_KL[bits] if kind == QUANTIZED else _APPROXIMATE_KL)


def divergence(want: torch.Tensor, got: torch.Tensor) -> float:
    """Mean KL divergence in nats of logits `[n, vocab]` from those wanted."""
    wanted, found = want.float().log_softmax(-1), got.float().log_softmax(-1)
    # Processors may forbid tokens; a token forbidden in both counts as no difference.
    terms = (wanted.exp() * (wanted - found)).nan_to_num(0.0)
    return max(0.0, float(terms.sum(-1).mean()))


def tolerance(engine: Verifiable) -> float:
    """The relative error that exact numbers of this engine may have."""
    return _TOLERANCE.get(engine.model.dtype, 1e-1)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative error by the norm; NaN counts as infinitely wrong."""
    error = float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-12))
    return error if error == error else float("inf")


def some_text(engine: Verifiable, tokens: int, skip: int = 0) -> list[int]:
    """`tokens` ids of English behind the first `skip`; fewer if the model has less room."""
    room = engine.max_positions
    exact = rope.exact_range_tokens(engine.model)
    limits = [limit // 2 for limit in (room, exact) if limit is not None]
    tokens = max(8, min(tokens, *limits)) if limits else tokens
    text = plain_text()[: 12 * (tokens + skip)]
    ids: list[int] = engine.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids[skip : skip + tokens]


class Stock:
    """KV and logits `[tokens, vocab]` of a text by the stock model, cache and attention."""

    def __init__(self, model: Any, token_ids: Sequence[int], *, logits: bool = True) -> None:
        device = model.get_input_embeddings().weight.device
        self.ids = torch.tensor([list(token_ids)], device=device)
        cache = DynamicCache()
        with decode.running(model, fast=False), torch.no_grad():
            rope.reset_dynamic_frequencies(model)
            keep = {} if logits else {"logits_to_keep": 1}
            output = model(input_ids=self.ids, past_key_values=cache, use_cache=True, **keep)
        self.logits = output.logits[0]
        self.kv: PastKVType = tuple((layer.keys, layer.values) for layer in cache.layers)

    def arena(self, layout: KVLayout, tokens: int) -> Arena:
        """An arena for all of it that holds the KV of the first `tokens`."""
        arena = Arena(layout, self.ids.shape[1])
        packed = layout.pack(tuple((key[:, :, :tokens], value[:, :, :tokens]) for key, value in self.kv))
        arena.place_at(packed, torch.arange(tokens))
        arena.set_length(tokens)
        return arena


class Recorder(LogitsProcessor):
    """Keeps the logits `[vocab]` of every step; with `path`, makes generation go along it."""

    def __init__(self, path: Sequence[int] | None = None) -> None:
        self.logits: list[torch.Tensor] = []
        self._path = path

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        self.logits.append(scores[0].float().cpu().clone())
        if self._path is None or len(self.logits) > len(self._path):
            return scores
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self._path[len(self.logits) - 1]] = 0.0
        return forced
