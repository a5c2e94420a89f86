"""Sampled windows: two texts with enough in common share one, however they are cut and wherever it stands."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.remote import fingerprints
from kvboost.remote.fingerprints import TailPlace, WindowPlace
from kvboost.store.content_index import WINDOW_TOKENS

EVERY = st.sampled_from([1, 4, 16, 64])


def tokens(count: int, seed: int, kinds: int = 50_000) -> np.ndarray:
    draw = random.Random(seed)
    return np.array([draw.randrange(kinds) for _ in range(count)], dtype=np.uint32)


@settings(max_examples=60, deadline=None)
@given(
    EVERY, st.integers(0, 200), st.integers(0, 200), st.integers(0, 200), st.integers(0, 10**6), st.booleans()
)
def test_a_common_run_has_a_common_sample(
    every: int, before: int, behind: int, other: int, seed: int, is_monotonous: bool
) -> None:
    """As docs say: of 31 + every tokens, wherever it stands in both."""
    kinds = 2 if is_monotonous else 50_000
    run = tokens(WINDOW_TOKENS - 1 + every, seed, kinds)
    one = np.concatenate([tokens(before, seed + 1), run, tokens(behind, seed + 2)])
    two = np.concatenate([tokens(other, seed + 3), run, tokens(before, seed + 4)])
    samples = [{value for _, value in fingerprints.sample(ids, every)} for ids in (one, two)]
    assert samples[0] & samples[1]


@settings(max_examples=60, deadline=None)
@given(EVERY, st.lists(st.integers(1, 90), min_size=1, max_size=8), st.integers(0, 10**6))
def test_chunk_by_chunk_as_in_one_piece(every: int, sizes: list[int], seed: int) -> None:
    """Machines that cut a text otherwise choose the same windows of it."""
    ids = tokens(sum(sizes), seed)
    found, start = set(), 0
    for size in sizes:
        for at, value in fingerprints.samples_known_with(ids[:start], ids[start : start + size], every):
            assert 0 <= start + at <= start + size - WINDOW_TOKENS
            assert (start + at, value) not in found, "once is enough"
            found.add((start + at, value))
        start += size
    whole = set(fingerprints.sample(ids, every))
    assert whole <= found, "what the reader asks for is there"
    if len(ids) >= fingerprints.context_tokens(every) + 1:
        extra = len(found - whole)  # of beginnings that are too short to be sure
        assert extra <= len(sizes)


def test_how_many_are_chosen() -> None:
    ids = tokens(10_000, 3)
    for every in (16, 64):
        chosen = fingerprints.sample(ids, every)
        assert len(ids) / every < len(chosen) < 2.5 * len(ids) / every
        gaps = np.diff([at for at, _ in chosen])
        assert gaps.max() <= every


def test_short_texts() -> None:
    assert fingerprints.sample(tokens(WINDOW_TOKENS - 1, 1), 16) == []
    assert len(fingerprints.sample(tokens(WINDOW_TOKENS, 1), 16)) == 1
    assert fingerprints.samples_known_with(tokens(0, 1), tokens(5, 1), 16) == []


def test_the_first_tokens_of_a_text_are_known_ahead() -> None:
    """Context that is longer than needed changes nothing."""
    ids = tokens(600, 4)
    long = fingerprints.samples_known_with(ids[:500], ids[500:], 16)
    short = fingerprints.samples_known_with(ids[500 - fingerprints.context_tokens(16) : 500], ids[500:], 16)
    assert long == short


PLACE = WindowPlace("ab" * 32, "cd" * 32, -5, 128, 64)
TAIL = TailPlace.of("ab" * 32, tokens(60, 5))


def test_places_there_and_back() -> None:
    assert WindowPlace.from_bytes(PLACE.to_bytes()) == PLACE
    assert TailPlace.from_bytes(TAIL.to_bytes()) == TAIL
    assert TAIL.may_begin(tokens(60, 5))
    assert TAIL.may_begin(tokens(20, 5))
    assert not TAIL.may_begin(tokens(15, 5))
    assert not TAIL.may_begin(tokens(60, 6))
    short = TailPlace.of("ab" * 32, tokens(5, 5))
    assert short.may_begin(tokens(5, 5))
    assert not short.may_begin(tokens(4, 5))


@pytest.mark.parametrize("place", [PLACE, TAIL], ids=["window", "tail"])
def test_damaged_places_are_none(place: WindowPlace | TailPlace) -> None:
    """A number in them says how much is to be read."""
    value = place.to_bytes()
    draw = random.Random(1)
    assert all(type(place).from_bytes(value[:size]) is None for size in range(len(value)))
    assert type(place).from_bytes(value + b"x") is None
    assert type(place).from_bytes(None) is None
    for at in range(len(value)):
        other = bytearray(value)
        other[at] ^= 1 << draw.randrange(8)
        assert type(place).from_bytes(bytes(other)) is None, at
