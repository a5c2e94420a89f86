"""The approximate chain: a chat over moved documents is repaired once; saving and loading it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvboost import KVBoost
from kvboost.choices import AssemblyMode, Origin
from kvboost.kv.arena import Arena
from kvboost.models import Borrow, CompositeChunk
from kvboost.reuse.assembler import Lookup
from tests.engine.reuse_checks import (
    Chat,
    approximate_tokens,
    chain_tokens,
    check_store,
    documents,
    joined,
    pay_always,
    shelf_engine,
)
from tests.fixture_types import MakeEngine
from tests.tiny_models import long_model, random_ids

pytestmark = pytest.mark.usefixtures("approximate_reuse")


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
    plan = engine.assembler.plan(Lookup(known, engine.namespace(), len(known), AssemblyMode.CHUNK_REUSE))
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
    assert store.forest.nodes(root)
    for number in range(40):
        engine.warm(random_ids(60, seed=600 + number))
        check_store(engine)
    assert not store.forest.nodes(root)
    assert not store.borrowers.by_donor()
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
    refuse = manager._inserter.refuse

    def meanwhile(*args: Any) -> None:  # what another thread may do at this moment
        engine.warm(document)
        refuse(*args)

    monkeypatch.setattr(manager._inserter, "refuse", meanwhile)
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
