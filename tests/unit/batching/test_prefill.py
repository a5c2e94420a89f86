"""Shares of a step's prompt tokens: first come, then short prompts, tenants in turns."""

from __future__ import annotations

import pytest

from kvboost.batching import prefill


def test_the_shortest_of_every_tenant_comes_first() -> None:
    needs = [
        prefill.Need(500, 500, "eve"),
        *(prefill.Need(5, 5, "eve") for _ in range(8)),
        prefill.Need(20, 20, "ann"),
    ]
    assert prefill.shares(64, needs) == [32, 5, 5, 2, 0, 0, 0, 0, 0, 20]


@pytest.mark.parametrize(
    ("budget", "needs", "shares"),
    [
        (64, [], []),
        (64, [(30, 30)], [30]),
        (64, [(500, 500)], [64]),
        (64, [(500, 500), (10, 10)], [54, 10]),
        (64, [(500, 500), (60, 200), (20, 20)], [32, 12, 20]),
        (64, [(10, 500), (60, 60), (60, 90)], [10, 54, 0]),
        (1, [(5, 5), (3, 3)], [1, 0]),
        (0, [(5, 5)], [0]),
    ],
)
def test_shares_of_a_step(budget: int, needs: list[tuple[int, int]], shares: list[int]) -> None:
    """Half for who came first, and then the shortest; nothing is left while somebody needs it."""
    assert prefill.shares(budget, [prefill.Need(*each) for each in needs]) == shares
