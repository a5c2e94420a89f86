"""Approximate reuse through the engine, on tiny models: found, labelled, bounded, never taken for exact."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from kvboost import GenerationResult, KVBoost
from kvboost.choices import AssemblyMode, Origin
from kvboost.errors import CacheFileError, InvalidRequestError
from kvboost.identity.namespace import Namespace
from kvboost.kv.arena import Arena
from kvboost.kv.rope import LENGTH_REASON, WINDOW_REASON
from kvboost.models import Borrow, CompositeChunk
from kvboost.proof import calibration
from kvboost.proof.calibration import Calibration
from kvboost.reuse import repair
from kvboost.reuse.costs import CostEstimate
from kvboost.reuse.plan import CHAIN_REASON, LOSSY_REASON
from kvboost.reuse.policy import BIT_EXACT_REASON, NOT_CALIBRATED_REASON
from kvboost.run import decode
from kvboost.store.content_index import ContentIndex
from kvboost.store.prefix_tree import below
from tests.tiny_models import LENGTH_DEPENDENT, random_ids, tiny_model

MakeEngine = Callable[..., KVBoost]
APPROXIMATE = (Origin.APPROXIMATE, Origin.RECOMPUTED)


def long_model(architecture: str = "llama", **changes: Any) -> Any:
    return tiny_model(architecture, max_position_embeddings=4096, **changes)


def documents(count: int, seed: int, low: int = 80, high: int = 300) -> list[list[int]]:
    draw = random.Random(seed)
    return [random_ids(draw.randint(low, high), seed=1000 * seed + number) for number in range(count)]


def joined(parts: Sequence[Sequence[int]]) -> list[int]:
    return [token for part in parts for token in part]


def check_spans(result: GenerationResult) -> None:
    """Spans cover the prompt, and the counts follow from them."""
    at = 0
    for span in result.spans:
        assert span.start == at < span.end
        at = span.end
    assert at == result.prompt_tokens
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
    store = engine.cache_manager._store
    debts: dict[str, set[str]] = {}
    indexed: dict[str, list[Any]] = {}
    for key, entry in store.entries.items():
        assert entry.readers == 0
        composite = entry.chunk.composite
        if composite is None:
            indexed.setdefault(store.namespaces[entry.root_key].content_key, []).append(entry.node)
            continue
        for borrow in composite.borrows:
            debts.setdefault(borrow.donor, set()).add(key)
            donor = store.entries[borrow.donor]  # nothing dangles
            taken = donor.chunk.token_ids[borrow.offset : borrow.offset + borrow.end - borrow.start]
            first = borrow.start - entry.node.start
            assert list(taken) == list(entry.chunk.token_ids[first : first + borrow.end - borrow.start])
    assert debts == store.borrowers
    for key, nodes in indexed.items():
        store.contents.get(key, ContentIndex()).check_integrity(nodes)
    budget = store.tier.max_bytes
    assert budget is None or store.tier.used_bytes <= budget


def approximate_tokens(result: GenerationResult) -> int:
    return sum(span.length for span in result.spans if span.origin in APPROXIMATE)


def chain_tokens(result: GenerationResult) -> int:
    return sum(span.length for span in result.spans if span.reason == CHAIN_REASON)


def pay_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models have tiny prompts, where a forward of its own hardly pays."""
    monkeypatch.setattr(CostEstimate, "pays", property(lambda _self: True))


# --- finding ------------------------------------------------------------------------------------


def test_a_document_is_found_at_any_offset(make_engine: MakeEngine) -> None:
    engine = make_engine(model=long_model(), recompute_ratio=0.0)
    draw = random.Random(1)
    found = documents(12, seed=1)
    for document in found:
        engine.warm(document)
    for number in range(50):
        document = found[number % len(found)]
        before = random_ids(draw.randint(1, 400), seed=9000 + number)
        prompt = [*before, *document, *random_ids(draw.randint(1, 40), seed=8000 + number)]
        inside = range(len(before), len(before) + len(document))
        cached = sum(
            len(range(max(span.start, inside.start), min(span.end, inside.stop)))
            for span in engine.assembler.plan(
                np.array(prompt), engine.namespace(), len(prompt) - 1, mode=AssemblyMode.CHUNK_REUSE
            ).spans()
            if span.origin is Origin.APPROXIMATE
        )
        assert cached >= 0.97 * len(document), (number, len(document), len(before))


def test_eight_documents_in_random_order_are_all_found(make_engine: MakeEngine) -> None:
    engine = make_engine(model=long_model())
    found = documents(8, seed=2)
    for document in found:
        engine.warm(document)
    for number in range(5):
        order = found[:]
        random.Random(number).shuffle(order)
        pieces: list[list[int]] = [random_ids(13, seed=500 + number)]
        wanted: list[range] = []
        for document in order:
            start = sum(map(len, pieces))
            wanted.append(range(start, start + len(document)))
            pieces += [document, random_ids(1 + number, seed=len(pieces))]
        result = engine.generate(joined(pieces), max_new_tokens=2)
        check_spans(result)
        for place in wanted:
            got = sum(
                len(range(max(s.start, place.start), min(s.end, place.stop)))
                for s in result.spans
                if s.origin is not Origin.LIVE
            )
            assert got >= 0.97 * len(place)
        assert 0 < result.recomputed_tokens <= 0.15 * result.cached_tokens + 1
        check_store(engine)


def test_moved_documents_name_their_donors(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    pay_always(monkeypatch)
    engine = make_engine(model=long_model())
    one, two = documents(2, seed=3)
    engine.warm(one)
    engine.warm(two)
    prompt = [*two, *one, *random_ids(9, seed=1)]
    result = engine.generate(prompt, max_new_tokens=1)
    donors = engine.cache_manager.match_prefix(one, engine.namespace()).matches
    moved = [span for span in result.spans if span.origin in APPROXIMATE]
    assert {span.donor for span in moved} == {match.chunk.chunk_id for match in donors}
    assert {span.reason for span in moved} == {f"moved by +{len(two)} positions"}
    assert [s.origin for s in result.spans if s.end <= len(two)] == [Origin.EXACT] * math.ceil(len(two) / 16)


def test_other_modes_use_nothing_approximate(make_engine: MakeEngine) -> None:
    engine = make_engine(model=long_model())
    one, two = documents(2, seed=4)
    engine.warm(one)
    engine.warm(two)
    prompt = [*random_ids(5, seed=1), *one, *two, *random_ids(9, seed=2)]
    before = engine.cache_stats()
    expected = engine.generate(prompt, max_new_tokens=6, mode="baseline")
    assert engine.cache_stats() == before
    result = engine.generate(prompt, max_new_tokens=6, mode="prefix_cache")
    assert {span.origin for span in result.spans} == {Origin.LIVE}
    assert result.token_ids == expected.token_ids
    engine.clear()
    engine.warm(one)
    engine.warm(two)
    explained = {
        mode: engine.explain(prompt, mode=mode) for mode in ("chunk_kv_reuse", "prefix_cache", "baseline")
    }
    assert explained["chunk_kv_reuse"].cached_tokens == len(one) + len(two)
    assert explained["prefix_cache"].cached_tokens == explained["baseline"].cached_tokens == 0
    assert explained["prefix_cache"].choice == ""
    assert [span.reason for span in explained["baseline"]] == ["baseline"]
    assert approximate_tokens(engine.generate(prompt, max_new_tokens=6)) == len(one) + len(two)
    again = engine.generate(prompt, max_new_tokens=6, mode="prefix_cache")  # nor the chain, nor the arena
    assert {span.origin for span in again.spans} <= {Origin.LIVE, Origin.EXACT}
    assert again.token_ids == expected.token_ids


def test_salts_never_share_content(make_engine: MakeEngine) -> None:
    engine = make_engine(model=long_model())
    document = random_ids(200, seed=5)
    engine.warm(document, cache_salt="mine")
    prompt = [*random_ids(7, seed=1), *document, 9, 8]
    assert engine.generate(prompt, max_new_tokens=2, cache_salt="mine").cached_tokens == 200
    for salt in ("", "yours"):
        assert engine.explain(prompt, cache_salt=salt).cached_tokens == 0
        result = engine.generate([*random_ids(3, seed=2), *prompt], max_new_tokens=2, cache_salt=salt)
        assert [(span.origin, span.reason) for span in result.spans] == [(Origin.LIVE, "never stored")]
    check_store(engine)


def test_other_weights_never_share_content(make_engine: MakeEngine) -> None:
    engine = make_engine(model=long_model())
    document = random_ids(200, seed=6)
    prompt = [*random_ids(7, seed=1), *document, 9, 8]
    engine.warm(document)
    assert engine.generate(prompt, max_new_tokens=2).cached_tokens == 200
    with torch.no_grad():
        engine.model.lm_head.weight[0, 0] += 1.0
    assert engine.explain(prompt).cached_tokens == 0
    assert engine.generate(prompt, max_new_tokens=2).cached_tokens == 0
    check_store(engine)


def test_clear_forgets_content_and_chains(make_engine: MakeEngine) -> None:
    engine = make_engine(model=long_model())
    document = random_ids(200, seed=7)
    prompt = [*random_ids(7, seed=1), *document, *random_ids(50, seed=2)]
    engine.warm(document)
    engine.generate(prompt, max_new_tokens=2)
    engine.clear()
    stats = engine.cache_stats()
    assert (stats["chunks"], stats["bytes"], stats["workspace_bytes"]) == (0, 0, 0)
    assert engine.explain(prompt).cached_tokens == 0
    store = engine.cache_manager._store
    assert not store.contents
    assert not store.borrowers
    check_store(engine)


# --- exact stays exact --------------------------------------------------------------------------


def fresh_kv(model: Any, ids: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    stock = DynamicCache()
    with torch.no_grad():
        model(torch.tensor([list(ids)]), past_key_values=stock, use_cache=True)
    return [(layer.keys, layer.values) for layer in stock.layers]


def check_exact_tree(engine: KVBoost, namespace: Namespace | None = None) -> int:
    """Every chunk of the exact tree holds what a full prefill of its path gives; returns their number."""
    store = engine.cache_manager._store
    root = store.roots.get((namespace or engine.namespace()).key)
    nodes = below(root) if root is not None else []
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


@pytest.mark.parametrize("architecture", ["llama", "phi", "gemma3"])
def test_exact_requests_stay_exact_among_approximate_ones(
    architecture: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pay_always(monkeypatch)
    changes = {"sliding_window": 1024} if architecture == "gemma3" else {}
    engine = make_engine(model=tiny_model(architecture, **changes), max_cache_bytes=1)
    per_token = engine.layout.bytes_per_token
    engine.close()
    engine = make_engine(model=engine.model, max_cache_bytes=900 * per_token)
    draw = random.Random(architecture)
    shelf = documents(9, seed=8, low=40, high=110)
    served = {"baseline": 0, "prefix_cache": 0, "chunk_kv_reuse": 0}
    approximate = exact = 0
    for number in range(70):
        parts = draw.sample(shelf, draw.randint(1, 4))
        if draw.random() < 0.5:
            parts.insert(0, shelf[0][:20])
        if draw.random() < 0.3:
            parts[-1] = parts[-1][draw.randrange(30) :]
        prompt = [*joined(parts), *random_ids(draw.randint(1, 12), seed=number)]
        mode = draw.choice(["baseline", "prefix_cache", "chunk_kv_reuse", "chunk_kv_reuse"])
        if draw.random() < 0.2:
            engine.warm(draw.choice(shelf))
        result = engine.generate(prompt, max_new_tokens=4, mode=mode)
        check_spans(result)
        served[mode] += 1
        if approximate_tokens(result):
            approximate += 1
            assert mode == "chunk_kv_reuse"
        else:
            exact += result.cached_tokens > 0
            expected = engine.generate(prompt, max_new_tokens=4, mode="baseline")
            assert result.token_ids == expected.token_ids, (number, mode)
        follow_up = [*prompt, *result.token_ids, *random_ids(3, seed=number)]
        if draw.random() < 0.3:
            wanted = engine.generate(follow_up, max_new_tokens=4, mode="baseline")
            got = engine.generate(follow_up, max_new_tokens=4, mode="prefix_cache")
            assert got.token_ids == wanted.token_ids, (number, mode)
        if number % 10 == 0:
            check_store(engine)
            check_exact_tree(engine)
    assert min(served.values()) >= 10
    assert approximate >= 15
    assert exact >= 3
    assert engine.cache_stats()["evicted_chunks"] > 0
    check_store(engine)
    assert check_exact_tree(engine) > 0


def test_nothing_computed_on_approximate_kv_is_in_the_exact_tree(make_engine: MakeEngine) -> None:
    engine = make_engine(model=long_model())
    shelf = documents(4, seed=9, low=80, high=120)
    for document in shelf:
        engine.warm(document)
    stored_exactly = check_exact_tree(engine)
    prompt = [*shelf[2], *shelf[0], *random_ids(60, seed=1), *shelf[3], *random_ids(40, seed=2)]
    result = engine.generate(prompt, max_new_tokens=20)
    assert approximate_tokens(result) > 0
    assert check_exact_tree(engine) == stored_exactly
    tainted = engine.cache_manager._store.roots[engine.namespace().tainted().key]
    assert below(tainted)  # the live text behind approximate text is kept, but not as exact
    starts_live = [*random_ids(50, seed=3), *shelf[1], *random_ids(5, seed=4)]
    result = engine.generate(starts_live, max_new_tokens=2)
    assert result.spans[0].origin is Origin.LIVE
    assert check_exact_tree(engine) > stored_exactly  # what stands before all that is approximate is exact
    assert engine.explain([*starts_live[:50], 7]).cached_tokens == 50
    check_store(engine)


def test_an_approximate_arena_never_stands_for_exact_text(make_engine: MakeEngine, tmp_path: Path) -> None:
    """The last request left approximate KV in place; the exact KV of the same text comes from a file."""
    model = long_model()
    shelf = documents(2, seed=26, low=120, high=160)
    prompt = [*random_ids(5, seed=1), *shelf[1], *shelf[0], *random_ids(9, seed=2)]
    one = make_engine(model=model)
    one.warm(prompt)
    one.save(tmp_path / "cache")
    two = shelf_engine(make_engine, shelf, model=model)
    assert approximate_tokens(two.generate(prompt, max_new_tokens=2)) > 0
    two.load(tmp_path / "cache")
    result = two.generate(prompt, max_new_tokens=8)
    assert {span.origin for span in result.spans[:-1]} == {Origin.EXACT}
    assert result.token_ids == two.generate(prompt, max_new_tokens=8, mode="baseline").token_ids
    kept = two.core.parts.workspace._kept
    assert kept is not None
    for layer, (key, value) in zip(kept.arena.layers, fresh_kv(model, prompt), strict=True):
        for part, wanted in ((layer._keys, key), (layer._values, value)):
            torch.testing.assert_close(part[:, :, : len(prompt)], wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("seed", range(12))
def test_random_requests_with_random_settings(
    seed: int, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pay_always(monkeypatch)
    draw = random.Random(seed)
    model = tiny_model("llama", num_hidden_layers=2)
    per_token = make_engine(model=model).layout.bytes_per_token
    budget_tokens = draw.choice([None, 120, 300, 700])
    sink = draw.choice([0, 0, 10])
    engine = make_engine(
        model=model,
        chunk_size=draw.choice([4, 16, 50, 128]),
        max_chunks=draw.choice([None, None, 3, 8, 20]),
        max_cache_bytes=None if budget_tokens is None else budget_tokens * per_token,
        sink_tokens=sink,
        selector=draw.choice(["guided", "deviation"]),
        recompute_ratio=draw.choice([0, 0.1, 0.5]),
        chunk_boundary_window=draw.choice([0, 0, 3]),
    )
    shelf = documents(5, seed=300 + seed, low=33, high=90)
    asked: list[list[int]] = []
    for step in range(25):
        action, salt = draw.random(), draw.choice(["", "", "other"])
        document = draw.choice(shelf)
        if action < 0.15:
            part = document[: draw.randint(1, len(document))]
            engine.warm(part, cache_salt=salt, position_offset=draw.choice([0, 0, 17]))
        elif action < 0.2:
            engine.clear()
        elif action < 0.3:
            draw.choice([engine.pin, engine.unpin])(document)
        else:
            prompt = joined(draw.sample(shelf, draw.randint(1, 4)))
            if asked and draw.random() < 0.4:
                prompt = draw.choice(asked)
            prompt = [*prompt, *random_ids(draw.randint(1, 40), seed=draw.randint(0, 5))]
            mode = draw.choice(["chunk_kv_reuse", "chunk_kv_reuse", "chunk_kv_reuse", "prefix_cache"])
            options: dict[str, Any] = draw.choice([{}, {}, {"num_beams": 2}])
            result = engine.generate(prompt, max_new_tokens=3, mode=mode, cache_salt=salt, **options)
            check_spans(result)
            assert all(span.start >= sink for span in result.spans if span.origin in APPROXIMATE)
            if approximate_tokens(result):
                assert mode == "chunk_kv_reuse"
            else:
                expected = engine.generate(prompt, max_new_tokens=3, mode="baseline", **options)
                assert result.token_ids == expected.token_ids, step
            asked.append([*prompt, *result.token_ids][:700])
        check_store(engine)
    for salt in ("", "other"):
        check_exact_tree(engine, engine.namespace(salt))


# --- the approximate chain ----------------------------------------------------------------------


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


@pytest.mark.parametrize("chunk_size", [16, 128])
def test_a_chat_over_reordered_documents_is_repaired_once(chunk_size: int, make_engine: MakeEngine) -> None:
    shelf = documents(3, seed=10, low=90, high=160)
    engine = shelf_engine(make_engine, shelf, chunk_size=chunk_size)
    chat = Chat(engine, [shelf[2], shelf[0], shelf[1]], seed=1)
    first = chat.turn()
    assert first.recomputed_tokens > 0
    for _ in range(4):
        known = len(chat.ids) - 1  # the KV of the answer's last token was never computed
        exact = chat.results[0].spans[0].length
        result = chat.turn()
        assert result.recomputed_tokens == 0
        assert result.cached_tokens == known
        assert {s.origin for s in result.spans[:-1] if s.start >= exact} == {Origin.APPROXIMATE}
        assert chain_tokens(result) >= known - exact
        assert result.spans[-1].origin is Origin.LIVE
        check_store(engine)


def test_interleaved_chats_get_the_same_answers(make_engine: MakeEngine) -> None:
    shelf = documents(4, seed=11, low=90, high=160)
    orders = [[shelf[2], shelf[0], shelf[3]], [shelf[1], shelf[3], shelf[0]]]
    model = long_model()
    alone = shelf_engine(make_engine, shelf, model=model)
    mixed = shelf_engine(make_engine, shelf, model=model)
    apart = [Chat(alone, order, seed=10 + n) for n, order in enumerate(orders)]
    together = [Chat(mixed, order, seed=10 + n) for n, order in enumerate(orders)]
    for chat in apart:
        for _ in range(5):
            chat.turn()
    for _ in range(5):
        for chat in together:
            chat.turn()
    for one, other in zip(apart, together, strict=True):
        assert [r.token_ids for r in one.results] == [r.token_ids for r in other.results]
        assert [r.recomputed_tokens for r in other.results[1:]] == [0] * 4
        assert [r.cached_tokens for r in one.results] == [r.cached_tokens for r in other.results]
    check_store(mixed)


def check_chain_is_what_was_computed(engine: KVBoost, ids: Sequence[int]) -> int:
    """The chain of `ids`, put together from the store, equals the arena of the request that left it."""
    kept = engine.core.parts.workspace._kept
    assert kept is not None
    known = kept.token_ids
    assert known.tolist() == list(ids[: len(known)])
    plan = engine.assembler.plan(known, engine.namespace(), len(known), mode=AssemblyMode.CHUNK_REUSE)
    arena = Arena(engine.layout, len(known))
    engine.assembler.place(plan, arena)
    assert plan.contiguous_end == len(known)
    for layer, (key, value) in enumerate(arena.as_past_key_values()):
        wanted = kept.arena.layers[layer]
        for part, held in ((key, wanted._keys), (value, wanted._values)):
            error = (part - held[:, :, : len(known)]).abs().amax(dim=(0, 1, 3))
            wrong = torch.nonzero(error > 1e-4).flatten().tolist()
            assert not wrong, f"layer {layer} differs at {len(wrong)} of {len(known)} tokens: {wrong[:8]}"
    return plan.chain_end


@pytest.mark.parametrize("selector", ["guided", "deviation"])
def test_the_chain_holds_what_was_computed(
    selector: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pay_always(monkeypatch)
    shelf = documents(3, seed=12, low=90, high=160)
    engine = shelf_engine(make_engine, shelf, selector=selector)
    chat = Chat(engine, [shelf[2], shelf[0], random_ids(45, seed=3), shelf[1]], seed=1)
    for _ in range(3):
        chat.turn()
        assert check_chain_is_what_was_computed(engine, chat.ids) > 300


def test_the_chain_does_not_borrow_live_text_of_another_request(make_engine: MakeEngine) -> None:
    """Two questions that begin alike share a short chunk by their tokens, but not their KV."""
    shelf = documents(3, seed=13, low=90, high=160)
    engine = shelf_engine(make_engine, shelf, chunk_size=16)
    opening = random_ids(20, seed=1)  # too short to be found by content
    for number, order in enumerate(([2, 0, 1], [1, 2, 0])):
        question = [*opening, *random_ids(30, seed=2 + number)]
        prompt = [*random_ids(4, seed=number), *joined([shelf[n] for n in order]), *question]
        result = engine.generate(prompt, max_new_tokens=2)
        assert result.spans[-1].length >= 50  # the question was computed
        check_chain_is_what_was_computed(engine, [*prompt, *result.token_ids])


@pytest.mark.parametrize("shared", [1, 10, 31])
def test_a_few_tokens_in_common_with_a_chain_do_not_make_a_prompt_approximate(
    shared: int, make_engine: MakeEngine
) -> None:
    """Text that merely begins like a chain goes on exactly, is stored so, and equals BASELINE."""
    shelf = documents(2, seed=25, low=120, high=160)
    engine = shelf_engine(make_engine, shelf)
    system = random_ids(50, seed=1)
    engine.warm(system)
    engine.generate([*system, *shelf[1], *shelf[0], *random_ids(9, seed=2)], max_new_tokens=2)
    prompt = [*system, *shelf[1][:shared], *random_ids(100, seed=3)]
    expected = engine.generate(prompt, max_new_tokens=8, mode="baseline")
    result = engine.generate(prompt, max_new_tokens=8)
    assert {span.origin for span in result.spans} == {Origin.EXACT, Origin.LIVE}
    assert result.token_ids == expected.token_ids
    again = engine.generate([*prompt, 5], max_new_tokens=2, mode="prefix_cache")
    assert again.cached_tokens == len(prompt)


def test_a_longer_chunk_in_the_place_of_a_tail_keeps_chains_usable(make_engine: MakeEngine) -> None:
    shelf = [random_ids(length, seed=length) for length in (102, 87)]
    more = random_ids(40, seed=5)
    model = long_model()
    answers = []
    for extended in (False, True):
        engine = shelf_engine(make_engine, shelf, model=model, chunk_size=16)
        chat = Chat(engine, [shelf[1], shelf[0]], seed=1)
        chat.turn()
        known = len(chat.ids) - 1
        if extended:
            for document in shelf:
                engine.warm([*document, *more])  # their tails of 6 and 7 tokens go
            check_store(engine)
        engine.generate(random_ids(50, seed=77), max_new_tokens=1)  # the arena is someone else's now
        result = chat.turn()
        assert (result.recomputed_tokens, result.cached_tokens) == (0, known)
        answers.append([r.token_ids for r in chat.results])
    assert answers[0] == answers[1]


def test_a_chain_goes_with_its_donors(make_engine: MakeEngine) -> None:
    shelf = documents(2, seed=14, low=90, high=120)
    model = long_model()
    per_token = make_engine(model=model).layout.bytes_per_token
    engine = shelf_engine(make_engine, shelf, model=model, max_cache_bytes=420 * per_token)
    chat = Chat(engine, [shelf[1], shelf[0]], seed=1)
    chat.turn()
    root = engine.namespace().approximate().key
    store = engine.cache_manager._store
    assert below(store.roots[root])
    for number in range(40):
        engine.warm(random_ids(60, seed=600 + number))
        check_store(engine)
    assert root not in store.roots or not below(store.roots[root])
    assert not store.borrowers
    again = chat.turn()
    assert chain_tokens(again) == 0
    check_store(engine)


def test_content_is_stored_once(make_engine: MakeEngine) -> None:
    shelf = documents(4, seed=15, low=90, high=160)
    engine = shelf_engine(make_engine, shelf)
    per_token = engine.layout.bytes_per_token
    draw = random.Random(15)
    for number in range(12):
        order = draw.sample(shelf, 4)
        prompt = [10 + number, 9, *joined(order), *random_ids(40, seed=50 + number)]
        before = engine.cache_stats()["bytes"]
        result = engine.generate(prompt, max_new_tokens=3)
        grown = (engine.cache_stats()["bytes"] - before) / per_token
        live = result.prompt_tokens - result.cached_tokens
        assert approximate_tokens(result) >= 350
        assert grown <= live + result.recomputed_tokens + 2, number  # 2: the answer's, but for the last
        again = engine.cache_stats()["bytes"]
        engine.generate(prompt, max_new_tokens=3)
        assert engine.cache_stats()["bytes"] == again  # the same request a second time stores nothing
        check_store(engine)


def test_chains_are_released_when_cleared_while_someone_reads(make_engine: MakeEngine) -> None:
    """A reader of a part of a chain; the chain's other donors go, and it is stored again meanwhile."""
    shelf = documents(2, seed=16, low=90, high=120)
    engine = shelf_engine(make_engine, shelf)
    prompt = [*random_ids(5, seed=1), *shelf[1], *shelf[0], *random_ids(9, seed=2)]
    engine.generate(prompt, max_new_tokens=2)
    manager = engine.cache_manager
    part = prompt[: 5 + len(shelf[1])]
    held = manager.match_content(part, engine.namespace(), start=0, end=len(part), hold=True)
    assert held.chain.length == len(part)
    manager.clear()  # all that nobody holds
    manager.check_integrity()
    for document in shelf:
        engine.warm(document)
    engine.generate(prompt, max_new_tokens=2)
    manager.release_content(held)
    check_store(engine)


def test_a_donor_that_comes_back_while_a_chain_is_refused(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(model=long_model())
    document = random_ids(16, seed=1)
    engine.warm(document)
    manager = engine.cache_manager
    donor = manager.match_prefix(document, engine.namespace()).matches[0].chunk.chunk_id
    engine.clear()
    refuse = manager._refuse

    def meanwhile(*args: Any) -> bool:  # what another thread may do at this moment
        engine.warm(document)
        return refuse(*args)

    monkeypatch.setattr(manager, "_refuse", meanwhile)
    manager.store_chain(
        document,
        CompositeChunk((Borrow(0, 16, donor, 0),), np.zeros(0, dtype=np.int64)),
        engine.layout,
        lambda _positions: (),
        engine.namespace(),
    )
    check_store(engine)


# --- saving and loading -------------------------------------------------------------------------


def test_saved_content_is_found_again(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pay_always(monkeypatch)
    model = long_model()
    shelf = documents(2, seed=17, low=90, high=120)
    one = shelf_engine(make_engine, shelf, model=model)
    offset_text, tainted_text = random_ids(80, seed=1), random_ids(70, seed=2)
    one.warm(offset_text, position_offset=33)
    prompt = [*random_ids(5, seed=3), *shelf[1], *shelf[0], *tainted_text]
    one.generate(prompt, max_new_tokens=1)
    store = one.cache_manager._store
    chains = sum(entry.chunk.composite is not None for entry in store.entries.values())
    assert chains == 1
    saved = one.save(tmp_path / "cache")
    assert saved == len(store.entries) - chains
    two = make_engine(model=model)
    assert two.load(tmp_path / "cache").loaded == saved
    check_store(two)
    for text in (offset_text, tainted_text[:-1], *shelf):
        asked = [*random_ids(11, seed=4), *text, *random_ids(5, seed=5)]
        expected, result = (engine.generate(asked, max_new_tokens=4) for engine in (one, two))
        assert approximate_tokens(result) == len(text)
        assert result.token_ids == expected.token_ids
    assert chain_tokens(two.generate(prompt, max_new_tokens=1)) == 0
    assert {span.reason for span in two.explain([*offset_text, 5]).spans[:-1]} == {"moved by -33 positions"}
    check_store(two)


# --- options ------------------------------------------------------------------------------------


def test_sink_tokens_are_never_approximate(make_engine: MakeEngine) -> None:
    shelf = documents(2, seed=18, low=100, high=160)
    for sink in (0, 40):
        engine = shelf_engine(make_engine, shelf, sink_tokens=sink)
        chat = Chat(engine, shelf[::-1], seed=1)
        for _ in range(3):
            result = chat.turn()
            first = min(span.start for span in result.spans if span.origin in APPROXIMATE)
            assert first == max(sink, 6)
        check_exact_tree(engine)


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


@pytest.mark.parametrize("sink", [0, 6])
def test_overlap_encoding_sees_the_sink_and_the_last_tokens(sink: int, make_engine: MakeEngine) -> None:
    model = long_model()
    text = random_ids(75, seed=1)
    wanted = overlap_reference(model, text, 16, 10, sink)
    for by_answer in (False, True):
        engine = make_engine(model=model, overlap_k=10, sink_tokens=sink)
        if by_answer:
            engine.generate(text, max_new_tokens=1)
        else:
            engine.warm(text[:60])
            engine.warm(text)
        matches = engine.cache_manager.match_prefix(text, engine.namespace()).matches
        assert matches[-1].end == 75
        for match in matches:
            for pair, wanted_pair in zip(match.chunk.past_key_values, wanted, strict=True):
                for part, full in zip(pair, wanted_pair, strict=True):
                    piece = full[:, :, match.start : match.start + part.shape[2]]
                    assert float((part - piece).norm() / piece.norm()) <= 1e-4


def test_what_is_committed_in_overlap_mode_has_its_encoding(make_engine: MakeEngine) -> None:
    """One's own generate saw everything; what it computed is not what this namespace promises."""
    engine = make_engine(model=long_model(), overlap_k=10)
    text = random_ids(75, seed=1)
    wanted = overlap_reference(engine.model, text, 16, 10, 0)
    prepared = engine.prepare(text, max_new_tokens=1)
    engine.commit(prepared, engine.model.generate(**prepared, max_new_tokens=1, do_sample=False))
    for match in engine.cache_manager.match_prefix(text, engine.namespace()).matches:
        for (key, _), (full, _) in zip(match.chunk.past_key_values, wanted, strict=True):
            piece = full[:, :, match.start : match.end]
            assert float((key[:, :, : piece.shape[2]] - piece).norm() / piece.norm()) <= 1e-4


def test_overlap_chunks_are_labelled_and_repaired_at_their_seams(make_engine: MakeEngine) -> None:
    model = long_model()
    text = random_ids(64 * 6, seed=1)
    options = {"chunk_size": 64, "overlap_k": 16, "recompute_overlap": 4}
    engine = make_engine(model=model, **options)
    engine.warm(text)
    prompt = [*text, *random_ids(9, seed=2)]
    result = engine.generate(prompt, max_new_tokens=6)
    check_spans(result)
    assert result.spans[0].origin is Origin.EXACT
    assert result.spans[0].end == 64
    assert [(s.start, s.end) for s in result.spans if s.origin is Origin.RECOMPUTED] == [
        (start, start + 4) for start in range(64, len(text), 64)
    ]
    assert {s.reason for s in result.spans if s.origin in APPROXIMATE} == {LOSSY_REASON}
    for mode in ("chunk_kv_reuse", "prefix_cache"):
        again = engine.generate(prompt, max_new_tokens=6, mode=mode)
        check_spans(again)
        assert approximate_tokens(again) > 0  # never passed off as exact
    other = make_engine(model=model, **options)
    other.warm(text)
    assert other.generate(prompt, max_new_tokens=6).token_ids == result.token_ids
    none = make_engine(model=model, **{**options, "recompute_strategy": "none"})
    none.warm(text)
    assert none.generate(prompt, max_new_tokens=6).recomputed_tokens == 0
    check_store(engine)


def test_overlap_encodings_are_not_shared(make_engine: MakeEngine, tmp_path: Path) -> None:
    model = long_model()
    engines = [make_engine(model=model, overlap_k=overlap) for overlap in (0, 8, 16)]
    assert len({engine.namespace().family for engine in engines}) == 3
    engines[1].warm(random_ids(60, seed=1))
    engines[1].save(tmp_path / "cache")
    for other in (engines[0], engines[2]):
        with pytest.raises(CacheFileError):
            other.load(tmp_path / "cache")


@pytest.mark.parametrize("architecture", ["mistral", "gemma3"])
def test_overlap_needs_a_model_without_a_sliding_window(architecture: str, make_engine: MakeEngine) -> None:
    with pytest.raises(InvalidRequestError, match="sliding window of 40"):
        make_engine(architecture, overlap_k=64, chunk_size=64)


def test_overlap_chunks_that_are_called_exact_are_exact(make_engine: MakeEngine) -> None:
    engine = make_engine("llama", overlap_k=64, chunk_size=64)
    text = random_ids(128, seed=5)
    engine.warm(text)
    prompt = [*text, *random_ids(3, seed=6)]
    expected = engine.generate(prompt, max_new_tokens=8, mode="baseline")
    result = engine.generate(prompt, max_new_tokens=8, mode="prefix_cache")
    assert {span.origin for span in result.spans} <= {Origin.EXACT, Origin.LIVE}
    assert result.token_ids == expected.token_ids


def test_overlap_reuse_that_does_not_pay_holds_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(model=long_model(), overlap_k=8)
    start, document = random_ids(40, seed=1), random_ids(64, seed=2)
    engine.warm(start)
    engine.warm(document)
    prompt = [*start, *random_ids(200, seed=3), *document[:40], *random_ids(5, seed=4)]
    assert engine.explain(prompt).choice.startswith("prefill")
    engine.generate(prompt, max_new_tokens=1)
    check_store(engine)


def test_bit_exact_reuses_nothing_approximate(make_engine: MakeEngine) -> None:
    engine = make_engine(model=long_model(), bit_exact=True)
    document = random_ids(96, seed=1)
    engine.warm(document)
    prompt = [*random_ids(16, seed=2), *document, 7]
    explanation = engine.explain(prompt)
    assert (explanation.choice, explanation.cached_tokens) == (BIT_EXACT_REASON, 0)
    assert engine.generate(prompt, max_new_tokens=2).cached_tokens == 0


@pytest.mark.parametrize("architecture", ["mistral", "gemma3", "qwen2_sliding", "phi3", "gemma2"])
def test_a_window_shorter_than_the_prompt_gets_exact_reuse_only(
    architecture: str, make_engine: MakeEngine
) -> None:
    engine = make_engine(architecture)
    document = random_ids(96, seed=1)
    engine.warm(document)
    prompt = [*random_ids(9, seed=2), *document, 7]
    explanation = engine.explain(prompt)
    assert (explanation.choice, explanation.cached_tokens) == (WINDOW_REASON, 0)
    result = engine.generate(prompt, max_new_tokens=4)
    assert result.cached_tokens == 0
    assert result.token_ids == engine.generate(prompt, max_new_tokens=4, mode="baseline").token_ids
    exact = engine.generate([*document, 8], max_new_tokens=4)
    assert exact.cached_tokens == 96


@pytest.mark.parametrize("kind", LENGTH_DEPENDENT)
def test_rope_that_changes_with_length_gets_exact_reuse_only(kind: str, make_engine: MakeEngine) -> None:
    engine = make_engine(kind)
    document = random_ids(64, seed=1)
    engine.warm(document)
    prompt = [*random_ids(9, seed=2), *document, 7]
    explanation = engine.explain(prompt, max_new_tokens=4)
    assert (explanation.choice, explanation.cached_tokens) == (LENGTH_REASON, 0)
    result = engine.generate(prompt, max_new_tokens=4)
    assert result.cached_tokens == 0
    assert result.token_ids == engine.generate(prompt, max_new_tokens=4, mode="baseline").token_ids


def test_scattered_matches_are_computed_instead(make_engine: MakeEngine) -> None:
    engine = make_engine(model=long_model())
    one, two = random_ids(64, seed=1), random_ids(64, seed=2)
    engine.warm(one)
    engine.warm(two)
    prompt = joined([random_ids(300, seed=3), one, random_ids(400, seed=4), two, random_ids(200, seed=5)])
    explanation = engine.explain(prompt)
    assert explanation.choice.startswith("prefill: approximate reuse would cost ")
    assert explanation.cached_tokens == 0
    result = engine.generate(prompt, max_new_tokens=4)
    assert result.cached_tokens == 0
    assert result.token_ids == engine.generate(prompt, max_new_tokens=4, mode="baseline").token_ids
    assert engine.explain([*prompt, 7]).cached_tokens >= len(prompt)  # it was all exact, and stored so
    three, four = random_ids(256, seed=6), random_ids(256, seed=7)
    engine.warm(three)
    engine.warm(four)
    worth_it = joined([random_ids(3, seed=8), four, three, random_ids(9, seed=9)])
    assert engine.explain(worth_it).choice.startswith("reuse: approximate reuse would cost 0.")
    check_store(engine)


def test_explain_changes_nothing_and_tells_what_happens(make_engine: MakeEngine) -> None:
    shelf = documents(3, seed=19, low=90, high=160)
    engine = shelf_engine(make_engine, shelf, recompute_ratio=0.0)
    chat = Chat(engine, shelf[::-1], seed=1)
    for _ in range(3):
        asked = [*chat.ids, *random_ids(20 + len(chat.results), seed=1 + 100 * len(chat.results) + 1)]
        store = engine.cache_manager._store
        before = engine.cache_stats(), {k: e.chunk.access_count for k, e in store.entries.items()}
        explanation = engine.explain(asked)
        assert explanation == engine.explain(asked)
        assert before == (
            engine.cache_stats(),
            {k: e.chunk.access_count for k, e in store.entries.items()},
        )
        result = chat.turn()
        assert chat.ids[: len(asked)] == asked
        assert [(s.start, s.end, s.origin, s.reason, s.donor) for s in result.spans] == [
            (s.start, s.end, s.origin, s.reason, s.donor) for s in explanation
        ]
        check_store(engine)


@pytest.mark.parametrize("strategy", ["selective", "cacheblend", "none"])
@pytest.mark.parametrize(("ratio", "selector"), [(0.0, "guided"), (0.1, "guided"), (0.3, "deviation")])
def test_the_ratio_is_kept_whatever_the_strategy(
    strategy: str, ratio: float, selector: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pay_always(monkeypatch)
    shelf = documents(3, seed=20, low=90, high=160)
    engine = shelf_engine(
        make_engine, shelf, recompute_ratio=ratio, selector=selector, recompute_strategy=strategy
    )
    prompt = [*random_ids(5, seed=1), *joined(shelf[::-1]), *random_ids(9, seed=2)]
    result = engine.generate(prompt, max_new_tokens=2)
    assert result.recomputed_tokens == math.ceil(ratio * approximate_tokens(result))


def made_up(engine: KVBoost, selector: str = "guided", **errors: float) -> Calibration:
    by_ratio = {float(name.replace("_", ".").strip("r")): error for name, error in errors.items()}
    return Calibration("made up", engine.namespace("").family, selector, by_ratio, 12, "2026-01-01T00:00:00")


def test_the_automatic_ratio(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVBOOST_CACHE_DIR", str(tmp_path))
    model = long_model()
    shelf = documents(3, seed=21, low=90, high=160)
    prompt = [*random_ids(5, seed=1), *joined(shelf[::-1]), *random_ids(9, seed=2)]
    uncalibrated = shelf_engine(make_engine, shelf, model=model, recompute_ratio="auto")
    assert uncalibrated.explain(prompt).choice == NOT_CALIBRATED_REASON
    assert uncalibrated.generate(prompt, max_new_tokens=2).cached_tokens == 0
    path = calibration.save(made_up(uncalibrated, r0_1=0.08, r0_2=0.04, r0_3=0.01))
    for bound, ratio in ((None, 0.2), (0.05, 0.2), (0.02, 0.3), (0.5, 0.1)):
        engine = shelf_engine(make_engine, shelf, model=model, recompute_ratio="auto", max_kl=bound)
        result = engine.generate(prompt, max_new_tokens=2)
        assert result.recomputed_tokens == math.ceil(ratio * approximate_tokens(result)) > 0
    strict = shelf_engine(make_engine, shelf, model=model, recompute_ratio="auto", max_kl=0.001)
    assert strict.explain(prompt).choice == "exact reuse only: no ratio held max_kl=0.001"
    assert strict.generate(prompt, max_new_tokens=2).cached_tokens == 0
    other_selector = make_engine(model=model, recompute_ratio="auto", selector="deviation")
    assert other_selector.explain(prompt).choice == NOT_CALIBRATED_REASON
    for damage in ("", "{", "[]", '{"format": "kvboost-calibration", "version": 1}', "\x00\xff"):
        path.write_text(damage, encoding="latin-1")
        with pytest.raises(CacheFileError, match="kvboost calibrate"):
            make_engine(model=model, recompute_ratio="auto")


# --- ways of generating -------------------------------------------------------------------------


def test_streams_give_what_generate_gives(make_engine: MakeEngine) -> None:
    model = long_model()
    shelf = documents(3, seed=22, low=90, high=160)
    prompt = [*random_ids(5, seed=1), *joined(shelf[::-1]), *random_ids(9, seed=2)]
    one, two = (shelf_engine(make_engine, shelf, model=model) for _ in range(2))
    expected = one.generate(prompt, max_new_tokens=12)
    stream = two.stream(prompt, max_new_tokens=12)
    assert "".join(stream) == expected.output_text
    assert stream.result.token_ids == expected.token_ids
    assert stream.result.spans == expected.spans
    assert expected.recomputed_tokens > 0
    check_store(two)
    broken_off = two.stream([*prompt, *random_ids(40, seed=3)], max_new_tokens=50)
    next(iter(broken_off))
    broken_off.close()
    check_store(two)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"do_sample": True, "seed": 5, "top_p": 0.9},
        {"num_beams": 2, "do_sample": True, "seed": 1},
    ],
    ids=lambda options: "+".join(options),
)
def test_beams_and_sampling_run_on_the_repaired_arena(
    options: dict[str, Any], make_engine: MakeEngine
) -> None:
    model = long_model()
    shelf = documents(3, seed=23, low=90, high=160)
    ids = np.array([*random_ids(5, seed=1), *joined(shelf[::-1]), *random_ids(9, seed=2)])
    engine = shelf_engine(make_engine, shelf, model=model)
    total = len(ids)
    with engine.assembler.planned(ids, engine.namespace(), total - 1, mode=AssemblyMode.CHUNK_REUSE) as plan:
        arena = Arena(engine.layout, total + 12)
        engine.assembler.place(plan, arena)
    strategy = engine.core.parts.approximation.strategy(plan)
    repair.complete(model, ids, arena, plan.repair_runs, strategy, end=total - 1)
    given = dict(options)
    seed, do_sample = given.pop("seed", None), given.pop("do_sample", False)
    checked = decode.read_options(model, 12, 1.0, do_sample, seed, given)
    if checked.num_rows > 1:
        arena.batch_repeat_interleave(checked.num_rows)
    expected = decode.generate(model, engine.tokenizer, ids, arena, checked, decode.Watch())
    result = engine.generate(ids.tolist(), max_new_tokens=12, **options)
    assert result.recomputed_tokens > 0
    assert result.token_ids == expected.token_ids
    check_store(engine)
    check_exact_tree(engine)
    follow_up = engine.generate([*ids.tolist(), *random_ids(5, seed=9)], max_new_tokens=2)
    assert chain_tokens(follow_up) >= total - plan.prefix_end - 5
    check_spans(follow_up)


@pytest.mark.parametrize("budget_tokens", [None, 500])
def test_threads_on_one_engine(budget_tokens: int | None, make_engine: MakeEngine) -> None:
    model = long_model()
    per_token = make_engine(model=model).layout.bytes_per_token
    budget = None if budget_tokens is None else budget_tokens * per_token
    shelf = documents(6, seed=24, low=60, high=110)
    engine = shelf_engine(make_engine, shelf, model=model, max_cache_bytes=budget)
    errors: list[BaseException] = []
    approximate: list[int] = []

    def work(number: int) -> None:
        draw = random.Random(number)
        try:
            for step in range(10):
                parts = draw.sample(shelf, 3)
                prompt = [*joined(parts), *random_ids(6, seed=10 * number + step)]
                result = engine.generate(prompt, max_new_tokens=3)
                check_spans(result)
                approximate.append(approximate_tokens(result))
                follow_up = engine.generate([*prompt, *result.token_ids, 9], max_new_tokens=2)
                check_spans(follow_up)
                if step % 3 == 0:
                    engine.warm(draw.choice(shelf))
                    engine.explain(prompt)
                stats = engine.cache_stats()
                assert budget is None or stats["bytes"] <= budget
        except BaseException as error:  # shown in the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert sum(map(bool, approximate)) >= 10
    check_store(engine)
    check_exact_tree(engine)
