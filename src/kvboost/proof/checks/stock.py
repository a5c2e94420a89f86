"""What parts are compared with: texts, and their KV and logits by the stock model. Knows no checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from kvboost.kv import rope
from kvboost.kv.arena import Arena
from kvboost.kv.layout import KVLayout
from kvboost.models import PastKVType
from kvboost.proof.documents import plain_text
from kvboost.proof.verifiable import Verifiable
from kvboost.run import decode

PROBE_TOKENS = 180
# Settings under which stored KV is what the model computed, cut at equal sizes.
PLAIN: dict[str, Any] = {"kv_cache_bits": 16, "overlap_k": 0, "sink_tokens": 0, "chunk_boundary_window": 0}


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
