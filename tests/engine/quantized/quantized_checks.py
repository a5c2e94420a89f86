"""What is checked of quantized KV: errors against a full prefill, bytes, labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvboost import KVBoost
from kvboost.choices import AssemblyMode, KVBits, Origin
from kvboost.identity.namespace import Namespace
from kvboost.kv.arena import Arena
from kvboost.kv.layout import Packed
from kvboost.models import PastKVType
from kvboost.reuse.assembler import Lookup
from kvboost.reuse.plan import QUANTIZED_REASON
from tests.engine.reuse_checks import check_store, fresh_kv, joined
from tests.tiny_models import long_model

LOSSY: tuple[KVBits, ...] = (8, 4, "k8v4")
ALL: tuple[KVBits, ...] = (16, *LOSSY)


# Relative error of stored KV against a full prefill; one encoding gives about 0.005 and 0.07.
TOLERANCE: dict[KVBits, float] = {16: 1e-4, 8: 0.012, 4: 0.2, "k8v4": 0.2}
BAD_TOKEN = 299  # neither random_ids nor the self-test at load uses it


def broken_model(number: float = float("nan")) -> Any:
    """A model whose KV is not finite from the first `BAD_TOKEN` on."""
    model = long_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[BAD_TOKEN] = number
    return model


def relative_error(part: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((part.double() - wanted.double()).norm() / wanted.double().norm())


def token_errors(part: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Per token, of `[1, kv_heads, tokens, head_dim]`."""
    gap, size = ((t.transpose(1, 2).flatten(2)).norm(dim=-1) for t in (part - wanted, wanted))
    return gap / size


def tree_errors(engine: KVBoost, namespace: Namespace | None = None) -> list[tuple[float, float]]:
    """Per layer, the largest error of stored keys and values against a full prefill of their text."""
    store = engine.cache_manager._store
    nodes = store.forest.nodes((namespace or engine.namespace()).key)
    worst = [(0.0, 0.0)] * len(engine.layout.layers)
    for leaf in (node for node in nodes if not node.children):
        path = [leaf]
        while path[-1].parent is not None and not path[-1].parent.is_root:
            path.append(path[-1].parent)
        ids = joined([store.entries[node.key].chunk.token_ids for node in reversed(path)])
        full = fresh_kv(engine.model, ids)
        for node in path:
            pairs = zip(worst, store.entries[node.key].chunk.past_key_values, full, strict=True)
            worst = [
                (
                    max(before[0], relative_error(key, wanted[0][:, :, node.start : node.end])),
                    max(before[1], relative_error(value, wanted[1][:, :, node.start : node.end])),
                )
                for before, (key, value), wanted in pairs
            ]
    return worst


def check_tree(engine: KVBoost, namespace: Namespace | None = None, factor: float = 1.0) -> None:
    """All that is stored as exact is what a full prefill gives, as far as the bits allow."""
    assert max(map(max, tree_errors(engine, namespace))) <= factor * TOLERANCE[engine.codec.bits]


def check_bytes(engine: KVBoost) -> None:
    """Reported bytes are those of the tensors, and those that the codec promised."""
    check_store(engine)
    entries = engine.cache_manager._store.entries.values()
    true_bytes = sum(part.untyped_storage().nbytes() for e in entries for part in e.chunk.kv.tensors)
    assert engine.cache_stats()["bytes"] == true_bytes
    for entry in entries:
        kv = entry.chunk.kv
        assert entry.size_bytes == kv.nbytes == engine.codec.bytes_for(kv.tokens)
        assert kv.codec.bits == engine.codec.bits
        own = entry.chunk.composite
        assert kv.tokens == (entry.chunk.length if own is None else len(own.own_positions))


def check_labels(engine: KVBoost, spans: Sequence[Any]) -> None:
    """Exact spans say that they are quantized, where they are."""
    reason = QUANTIZED_REASON if engine.codec.is_lossy else ""
    assert {span.reason for span in spans if span.origin is Origin.EXACT} <= {reason}
    assert all(span.reason != QUANTIZED_REASON for span in spans if span.origin is not Origin.EXACT)


def tensors_of(engine: KVBoost) -> dict[str, Packed]:
    return {key: entry.chunk.kv.tensors for key, entry in engine.cache_manager._store.entries.items()}


def placed(engine: KVBoost, ids: Sequence[int], mode: AssemblyMode = AssemblyMode.CHUNK_REUSE) -> PastKVType:
    """What the store alone gives for `ids`, as far as it reaches from the start."""
    plan = engine.assembler.plan(Lookup(np.array(ids), engine.namespace(), len(ids), mode))
    arena = Arena(engine.layout, len(ids))
    engine.assembler.place(plan, arena)
    return arena.as_past_key_values()
