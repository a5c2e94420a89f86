"""Where the sequences of a fixed batch lie in an arena: shared prefixes once, then a lane for each sequence.

Knows segments and plans; who takes the arena and runs the model is decided above.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvboost.batching.prefixes import Branch, plan_forest
from kvboost.choices import Origin
from kvboost.kv.arena import Arena
from kvboost.models import Span
from kvboost.requests.request import Request
from kvboost.reuse.plan import PlanPart, ReusePlan
from kvboost.run.packed_step import Segment

SHARED_REASON = "computed once for the batch"


class BatchLayout:
    """The slots of a batch: a segment for every branch that sequences share, and lanes of one size."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.forest = plan_forest(
            [request.token_ids for request in requests], [request.limit for request in requests]
        )
        self.slots = 0
        self.branches: dict[Branch, Segment] = {}
        for branch in self.forest.branches:
            size = branch.end - branch.start
            self.branches[branch] = Segment(self._take(size), size, self._segments(branch.parent))
        lane_tokens = max(requests[i].needed - self.forest.start_of(i) for i in self.forest.order)
        lanes: dict[int, Segment] = {}
        for index in self.forest.order:
            before = self._segments(self.forest.branch_of[index])
            lanes[index] = Segment(self._take(lane_tokens), lane_tokens, before, clean=True)
        self.lanes = [lanes[index] for index in range(len(requests))]

    def _take(self, count: int) -> int:
        start = self.slots
        self.slots += count
        return start

    def _segments(self, branch: Branch | None) -> tuple[Segment, ...]:
        return tuple(self.branches[each] for each in branch.path) if branch is not None else ()

    @property
    def shared_tokens(self) -> int:
        """Tokens of all branches."""
        return sum(branch.end - branch.start for branch in self.branches)

    @property
    def first(self) -> int:
        """A sequence whose text begins in the first slot: branches come before lanes."""
        return self.forest.branches[0].sequences[0] if self.forest.branches else self.forest.order[0]

    def parts(self, plans: list[ReusePlan], already: int) -> list[PlanPart]:
        """What to place where, by the sequences' `plans`; the first `already` slots hold it by now.

        Sets the lengths of all segments to what is placed then.
        """
        found = []
        for branch, segment in self.branches.items():
            best = max((plans[index] for index in branch.sequences), key=lambda plan: plan.prefix_end)
            segment.length = min(max(0, best.prefix_end - branch.start), segment.capacity)
            in_place = min(already, segment.length) if segment.start == 0 else 0
            found.append(PlanPart.exact(best, branch.start + in_place, branch.end, segment.start + in_place))
        for index in self.forest.order:
            lane, plan = self.lanes[index], plans[index]
            lane.length = max(0, plan.prefix_end - lane.position)
            in_place = min(already, lane.length) if lane.start == 0 else 0
            start, end = lane.position + in_place, lane.position + lane.length
            found.append(PlanPart.exact(plan, start, end, lane.start + in_place))
        return found

    def unfilled(self) -> list[list[tuple[Segment, Branch]]]:
        """Branches that are not filled, by level: each comes behind those of the levels before it."""
        levels: dict[int, list[tuple[Segment, Branch]]] = {}
        for branch, segment in self.branches.items():
            if segment.length < segment.capacity:
                levels.setdefault(len(segment.before), []).append((segment, branch))
        return [level for _, level in sorted(levels.items())]

    def spans(self, plan: ReusePlan, index: int) -> tuple[Span, ...]:
        """The origin of every prompt token of a sequence, before anything was computed.

        What is computed once for several sequences is live for the first of them, and exact for the others.
        """
        *cached, last = plan.spans()  # a prompt's last token is always live
        branch = self.forest.branch_of[index]
        at, spans = plan.prefix_end, cached
        for each in branch.path if branch is not None else ():
            edge = each.end if index != each.sequences[0] else self.branches[each].end
            for end, origin, reason in (
                (edge, Origin.EXACT, SHARED_REASON),
                (each.end, Origin.LIVE, plan.reason),
            ):
                if end > at:
                    spans.append(Span(at, end, origin, reason))
                    at = end
        return tuple(_joined([*spans, Span(at, plan.total, last.origin, last.reason)]))


@dataclass(frozen=True)
class PlacedBatch:
    """A layout in its arena, with the plan of every sequence and the origin of its prompt tokens."""

    layout: BatchLayout
    arena: Arena
    plans: list[ReusePlan]
    spans: list[tuple[Span, ...]]


def _joined(spans: list[Span]) -> Iterator[Span]:
    """Adjacent live spans as one, and likewise shared ones."""
    held: Span | None = None
    for span in spans:
        if held is not None and not span.donor and (held.origin, held.reason) == (span.origin, span.reason):
            held = replace(held, end=span.end)
            continue
        if held is not None:
            yield held
        held = span
    if held is not None:
        yield held
