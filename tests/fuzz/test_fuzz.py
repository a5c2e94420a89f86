"""A short run of the fuzzer with fixed seeds. `make soak` has ten minutes of it; see docs/contributing.md."""

from __future__ import annotations

import pytest

from tests.fuzz.hunt import hunt
from tests.fuzz.machine import GROUPS, REQUESTS, chosen_groups
from tests.fuzz.subject import KINDS

pytestmark = pytest.mark.exactness


@pytest.mark.parametrize("kind", KINDS)
def test_requests_on_a_model_that_changes(kind: str) -> None:
    tally = hunt(KINDS.index(kind), examples=4, steps=40, kinds=[kind], groups=chosen_groups())
    assert tally.near_ties <= tally.checks // 50
    if chosen_groups() == GROUPS:
        assert tally.checks > 20
        assert tally.hits > 5
        assert tally.changes > 15


def test_requests_on_a_model_that_stays() -> None:
    tally = hunt(13, examples=4, steps=40, groups=frozenset(REQUESTS) - {"ambient"})
    assert tally.hits > 50


@pytest.mark.parametrize("kind", KINDS)
def test_requests_in_the_engines_own_batch(kind: str) -> None:
    """What runs on a GPU, on a CPU: the arena stays from request to request, whatever the model does."""
    tally = hunt(
        20 + KINDS.index(kind), examples=3, steps=40, kinds=[kind], groups=chosen_groups(), resident=True
    )
    assert tally.near_ties <= tally.checks // 50
