"""What tests of reuse check and count: spans, stores, the exact tree, and chats over documents."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvboost import GenerationResult, KVBoost
from kvboost.choices import Origin
from kvboost.identity.namespace import Namespace
from kvboost.reuse.costs import CostEstimate
from kvboost.reuse.plan import CHAIN_REASON
from kvboost.store.content_index import ContentIndex
from tests.fixture_types import MakeEngine
from tests.tiny_models import long_model, random_ids

APPROXIMATE = (Origin.APPROXIMATE, Origin.RECOMPUTED)


def documents(count: int, seed: int, low: int = 80, high: int = 300) -> list[list[int]]:
    draw = random.Random(seed)
    return [random_ids(draw.randint(low, high), seed=1000 * seed + number) for number in range(count)]


def joined(parts: Sequence[Sequence[int]]) -> list[int]:
    return [token for part in parts for token in part]


def check_covered(result: GenerationResult) -> None:
    """Spans cover the prompt, in order and without gaps."""
    at = 0
    for span in result.spans:
        assert span.start == at < span.end
        at = span.end
    assert at == result.prompt_tokens


def check_spans(result: GenerationResult) -> None:
    """Spans cover the prompt, and the counts follow from them."""
    check_covered(result)
    by_origin = {origin: sum(s.length for s in result.spans if s.origin is origin) for origin in Origin}
    assert result.cached_tokens == result.prompt_tokens - by_origin[Origin.LIVE]
    assert result.recomputed_tokens == by_origin[Origin.RECOMPUTED]
    assert result.kv_reuse_ratio == result.cached_tokens / result.prompt_tokens
    for span in result.spans:
        assert span.donor or span.origin is Origin.LIVE
        assert span.reason or span.origin is Origin.EXACT


def check_store(engine: KVBoost) -> None:
    """Books, chains and content index agree, and nobody holds anything."""
    engine.cache_manager.check_integrity()
    pool = engine.cache_manager._store
    debts: dict[str, set[str]] = {}
    indexed: dict[str, list[Any]] = {}
    for key, entry in pool.entries.items():
        assert entry.readers == 0
        composite = entry.chunk.composite
        if composite is None:
            indexed.setdefault(pool.forest.namespace(entry.root_key).content_key, []).append(entry.node)
            continue
        for borrow in composite.borrows:
            debts.setdefault(borrow.donor, set()).add(key)
            donor = pool.entries[borrow.donor]  # nothing dangles
            taken = donor.chunk.token_ids[borrow.offset : borrow.offset + borrow.end - borrow.start]
            first = borrow.start - entry.node.start
            assert list(taken) == list(entry.chunk.token_ids[first : first + borrow.end - borrow.start])
    assert debts == pool.borrowers.by_donor()
    for key, nodes in indexed.items():
        (pool.forest.content(key) or ContentIndex()).check_integrity(nodes)
    assert pool.budget.max_bytes is None or pool.budget.used_bytes <= pool.budget.max_bytes


def approximate_tokens(result: GenerationResult) -> int:
    return sum(span.length for span in result.spans if span.origin in APPROXIMATE)


def chain_tokens(result: GenerationResult) -> int:
    return sum(span.length for span in result.spans if span.reason == CHAIN_REASON)


def pay_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models have tiny prompts, where a forward of its own hardly pays."""
    monkeypatch.setattr(CostEstimate, "pays", property(lambda _self: True))


def fresh_kv(model: Any, ids: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    stock = DynamicCache()
    with torch.no_grad():
        model(torch.tensor([list(ids)]), past_key_values=stock, use_cache=True)
    return [(layer.keys, layer.values) for layer in stock.layers]


def check_exact_tree(engine: KVBoost, namespace: Namespace | None = None) -> int:
    """Every chunk of the exact tree holds what a full prefill of its path gives; returns their number."""
    store = engine.cache_manager._store
    nodes = store.forest.nodes((namespace or engine.namespace()).key)
    for leaf in (node for node in nodes if not node.children):
        path = [leaf]
        while path[-1].parent is not None and not path[-1].parent.is_root:
            path.append(path[-1].parent)
        ids = joined([store.entries[node.key].chunk.token_ids for node in reversed(path)])
        wanted = fresh_kv(engine.model, ids)
        for node in path:
            chunk = store.entries[node.key].chunk
            assert chunk.composite is None
            for pair, wanted_pair in zip(chunk.past_key_values, wanted, strict=True):
                for part, full in zip(pair, wanted_pair, strict=True):
                    piece = full[:, :, node.start : node.end]
                    assert float((part - piece).norm() / piece.norm()) <= 1e-4
    return len(nodes)


class Chat:
    """A conversation over documents in an order of its own, in token ids."""

    def __init__(self, engine: KVBoost, parts: Sequence[Sequence[int]], seed: int, **options: Any) -> None:
        self.engine = engine
        self.ids = [*random_ids(6, seed=seed), *joined(parts)]
        self.seed = seed
        self.options = options
        self.results: list[GenerationResult] = []

    def turn(self) -> GenerationResult:
        number = len(self.results)
        self.ids += random_ids(20 + number, seed=self.seed + 100 * number + 1)
        result = self.engine.generate(self.ids, max_new_tokens=6, **self.options)
        check_spans(result)
        self.results.append(result)
        self.ids += result.token_ids
        return result


def shelf_engine(make_engine: MakeEngine, shelf: Sequence[Sequence[int]], **options: Any) -> KVBoost:
    engine = make_engine(model=options.pop("model", None) or long_model(), **options)
    for document in shelf:
        engine.warm(list(document))
    return engine


def overlap_reference(model: Any, ids: Sequence[int], chunk: int, overlap: int, sink: int) -> Any:
    """KV where each chunk sees only the sink tokens and the last `overlap` tokens before it."""
    stock = DynamicCache()
    for start in range(0, len(ids), chunk):
        end = min(start + chunk, len(ids))
        keys, queries = torch.arange(end), torch.arange(start, end)[:, None]
        visible = (keys <= queries) & ((keys < sink) | (keys >= start - overlap))
        mask = torch.zeros(visible.shape).masked_fill_(~visible, torch.finfo(torch.float32).min)[None, None]
        with torch.no_grad():
            model(
                torch.tensor([list(ids[start:end])]),
                position_ids=queries.T,
                attention_mask=mask,
                past_key_values=stock,
                use_cache=True,
            )
    return [(layer.keys, layer.values) for layer in stock.layers]
