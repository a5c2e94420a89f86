"""The bounded memory of what was evicted, and reasons in a few words."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.models import chained_hash, token_bytes
from kvboost.store import forest
from kvboost.store.forest import EvictedChunks, reason_kind

parents = st.sampled_from(["", "a" * 64, "b" * 64])
spans = st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple)


@given(st.lists(st.tuples(st.booleans(), parents, spans), max_size=30), parents, spans)
@settings(deadline=None, max_examples=150)
def test_it_knows_exactly_what_was_evicted(
    steps: list[tuple[bool, str, tuple[int, ...]]], parent: str, text: tuple[int, ...]
) -> None:
    evicted = EvictedChunks()
    model: set[tuple[str, tuple[int, ...]]] = set()
    for remember, under, span in steps:
        key = chained_hash(span, under)
        if remember:
            evicted.remember(key, under, len(token_bytes(span)))
            model.add((under, span))
        else:
            evicted.forget(key)
            model.discard((under, span))
    expected = any(under == parent and text[: len(span)] == span for under, span in model)
    assert bool(evicted.why_start_went(token_bytes(text), parent)) == expected
    for under, span in model:
        evicted.forget(chained_hash(span, under))
    assert not evicted._keys
    assert not evicted._sizes
    evicted.remember("key", parent, 4)
    evicted.clear()
    assert not bool(evicted.why_start_went(token_bytes(text), parent))


def test_forgetting_what_was_never_remembered_does_nothing() -> None:
    evicted = EvictedChunks()
    evicted.remember(chained_hash([1]), "", 4)
    evicted.forget("something else")
    assert bool(evicted.why_start_went(token_bytes([1, 2]), ""))


def test_the_memory_is_bounded_and_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forest, "_MAX_REMEMBERED", 3)
    evicted = EvictedChunks()
    for token in range(10):
        evicted.remember(chained_hash([token], f"parent {token}"), f"parent {token}", 4)
    assert [bool(evicted.why_start_went(token_bytes([t]), f"parent {t}")) for t in range(10)] == [
        False
    ] * 7 + [True] * 3
    assert len(evicted._keys) == len(evicted._sizes) == 3


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("diverged at token 7: expected 1, got 2", "diverged"),
        ("never stored", "never stored"),
        ("other namespace", "other namespace"),
        ("gated: rope changes with length", "gated"),
    ],
)
def test_reasons_without_their_particulars(reason: str, kind: str) -> None:
    assert reason_kind(reason) == kind
