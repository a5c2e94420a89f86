"""Which prompt tokens go into the next step: first come, then short prompts, tenants in turns.

Knows sequences and their nodes; how many tokens there are to share out is told.
"""

from __future__ import annotations

from collections import Counter, abc
from typing import NamedTuple

from kvboost.batching.radix_tree import Node
from kvboost.batching.sequence import Sequence
from kvboost.run.packed_step import Extension


class Fill(NamedTuple):
    """Prompt tokens that go through in the next step, and the sequence that they are computed for."""

    sequence: Sequence
    extension: Extension


class Turns:
    """Whose prompts the next step reads."""

    def __init__(self) -> None:
        self._newcomers_had_a_turn = False

    def next(self, sequences: abc.Sequence[Sequence]) -> abc.Sequence[Sequence]:
        """All, or every other step only the sequences of tenants that have no token yet, if there are any.

        So a tenant that floods the batch with long prompts cannot keep another from its first token.
        """
        served = {sequence.tenant for sequence in sequences if sequence.is_decoding}
        newcomers = [sequence for sequence in sequences if sequence.tenant not in served]
        if self._newcomers_had_a_turn or len({sequence.tenant for sequence in sequences}) < 2:
            newcomers = []
        self._newcomers_had_a_turn = bool(newcomers)
        return newcomers or sequences


def fills_of(sequences: abc.Sequence[Sequence], budget: int) -> dict[int, Fill]:
    """The next `budget` prompt tokens of `sequences`, which come in order of arrival, by their node's id.

    Each node is filled once, however many sequences wait for it.
    """
    waiting: dict[int, tuple[Sequence, Node]] = {}
    for sequence in sequences:
        if (node := sequence.unfilled) is not None and not (node.is_private and sequence.awaits_choice):
            waiting.setdefault(id(node), (sequence, node))
    needs = [_need(sequence, node) for sequence, node in waiting.values()]
    return {
        id(node): Fill(sequence, Extension(node.segment, node.tokens[node.segment.to_compute[:count]], 0))
        for (sequence, node), count in zip(waiting.values(), shares(budget, needs), strict=True)
        if count
    }


def speaks_first(sequence: Sequence, fills: dict[int, Fill]) -> bool:
    """Whether a sequence gets its first token in a step with `fills`, which fill the rest of its prompt."""
    missing = [node for node in sequence.node.path if not node.is_filled]
    return (
        sequence.answers
        and not sequence.is_decoding
        and all(
            id(node) in fills and len(fills[id(node)].extension.token_ids) == len(node.segment.to_compute)
            for node in missing
        )
    )


class Need(NamedTuple):
    """Tokens that a node needs now, and that its sequence needs in all."""

    now: int
    in_all: int
    tenant: str = ""


def _need(sequence: Sequence, node: Node) -> Need:
    now = len(node.segment.to_compute)
    later = [each for each in sequence.node.path if each.segment.position > node.segment.position]
    return Need(now, now + sum(len(each.segment.to_compute) for each in later), sequence.tenant)


def shares(budget: int, needs: abc.Sequence[Need]) -> list[int]:
    """How many of `budget` tokens go to each of `needs`, which come in order of arrival.

    Half of them belong to the first; then the shortest come next, tenants in turns, so that no prompt waits
    long for a long one.
    """
    given = [0] * len(needs)
    if needs:
        others = sum(each.now for each in needs[1:])
        given[0] = min(needs[0].now, max(budget - others, (budget + 1) // 2))
    left = budget - sum(given)
    for index in _in_turns(needs[1:]):
        given[index + 1] = min(needs[index + 1].now, left)
        left -= given[index + 1]
    return given


def _in_turns(needs: abc.Sequence[Need]) -> list[int]:
    """Indices: the shortest of every tenant, then the second of every tenant, and so on."""
    turns: dict[int, int] = {}
    seen: Counter[str] = Counter()
    shortest_first = sorted(range(len(needs)), key=lambda index: needs[index].in_all)
    for index in shortest_first:
        turns[index] = seen[needs[index].tenant]
        seen[needs[index].tenant] += 1
    return sorted(shortest_first, key=turns.__getitem__)
