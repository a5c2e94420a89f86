"""A request in the running batch: where its KV lies, how far it is, and where its prompt's KV came from.

Knows segments and plans; when it runs is the scheduler's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from transformers import DynamicCache

from kvboost.batching.radix_tree import Node
from kvboost.choices import Origin
from kvboost.compat import text_config
from kvboost.identity.namespace import Namespace
from kvboost.models import GenerationResult, Span
from kvboost.requests.request import Request
from kvboost.reuse.plan import PlanPart, ReusePlan
from kvboost.run import decode
from kvboost.run.packed_step import Extension, Segment
from kvboost.run.sampling import SequenceSampler

SHARED_REASON = "in use by another request"
LEFT_REASON = "another request was to compute it, and left"


TakeLogits = Callable[[int, torch.Tensor], None]  # takes logits `[n, vocab]` of tokens from a position on


class ModelChangedError(Exception):
    """The model changed while a request ran: its KV is of the model before."""


class Listener(Protocol):
    """Hears what becomes of a request, in the thread that drives the scheduler."""

    def token(self, token_id: int) -> None:
        """The next token of the answer."""

    def done(self, result: GenerationResult) -> None:
        """The answer is complete, or was cut off by `leave`."""

    def failed(self, error: Exception) -> None:
        """There is no answer."""


def prefill_tokens(request: Request, *, answers: bool, in_tree: int | None = None) -> int:
    """Prompt tokens that go into the radix tree, at most `in_tree`.

    The last one of an answered prompt never does: it gives the first token.
    """
    if not answers:
        return len(request.token_ids)
    return request.limit if in_tree is None else in_tree


class Sequence:
    """A request in the running batch. With `answers=False` only its prompt is computed.

    With `scores`, that gets the logits behind the prompt, and then it is through.

    Its KV lies in the nodes of the radix tree up to `node`, then in `spilled`, then in its `lane`. From the
    first text that has moved on, the nodes are private, and hold what is reused from the start.
    """

    def __init__(
        self,
        request: Request,
        listener: Listener,
        *,
        answers: bool,
        tenant: str = "",
        scores: TakeLogits | None = None,
        in_tree: int | None = None,
    ) -> None:
        self.request = request
        self.listener = listener
        self.tenant = tenant
        self.answers = answers
        self.scores = scores
        self.is_sampled = answers and scores is None
        self.node: Node
        self.lane = Segment(0, 0)
        self.spilled: list[Segment] = []  # parts of its answer that its lane had no room for
        self.reserved = 0  # slots that its answer may still need beside its lane
        self.plan: ReusePlan
        self.in_place = 0  # tokens that lay or were being computed in the arena before it came
        self.computed_from = len(request.token_ids)  # the first position that went through the model for it
        self.awaits_choice = False  # which of the reused tokens are computed again is still to be chosen
        self.recomputed = np.zeros(0, dtype=np.int64)  # their positions `[n]`
        self.sampler: SequenceSampler  # of one that is sampled
        self.stored_tokens = 0  # of its prompt
        self.stock: StockDecoder | None = None  # set where it runs outside the arena
        self.is_decoding = False  # its whole prompt went through
        self.in_tree = in_tree  # if set, so many of its prompt's tokens; the others go into its lane at once
        self.tail_pulled = in_tree is not None  # the end of its prompt is in its lane, if that was possible

    @property
    def has_spoken(self) -> bool:
        """Whether its answer has begun."""
        return self.is_sampled and bool(self.sampler.new_ids)

    @property
    def next_extension(self) -> Extension:
        """The token that it feeds next: its newest, or the last of its prompt and those that are scored."""
        if self.is_decoding:
            return Extension(self.lane, np.array(self.sampler.new_ids[-1:]))
        ids = self.request.token_ids
        return Extension(self.lane, ids[self.lane.end :], len(ids) - self.request.limit)

    @property
    def limit(self) -> int:
        """Prompt tokens that go into the radix tree."""
        return prefill_tokens(self.request, answers=self.answers, in_tree=self.in_tree)

    @property
    def unfilled(self) -> Node | None:
        """The first part of its prompt that is not computed yet."""
        return next((node for node in self.node.path if not node.is_filled), None)

    @property
    def filled_tokens(self) -> int:
        """How many of its first prompt tokens have their KV in the arena."""
        node = self.unfilled
        return node.segment.end if node is not None else self.node.end

    @property
    def own_nodes(self) -> list[Node]:
        """Nodes of its prompt that were made for it."""
        return [node for node in self.node.path if node.segment.position >= self.in_place]

    @property
    def private_nodes(self) -> list[Node]:
        """Those that no other sequence can find."""
        return [node for node in self.node.path if node.is_private]

    @property
    def exact_tokens(self) -> int:
        """How many of its first prompt tokens have exact KV, computed or not."""
        return self.plan.first_approximate

    def parts_of(self, plan: ReusePlan) -> list[PlanPart]:
        """What `plan` has for the nodes that were made for it and for its lane; that counts as there then."""
        found = []
        for node in self.own_nodes:
            segment = node.segment
            if node.is_private:
                segment.length, segment.missing = segment.capacity, np.arange(segment.capacity)
                found.append(PlanPart.any_kind(plan, segment.position, node.end, segment.start))
            else:
                segment.length = min(max(0, plan.prefix_end - segment.position), segment.capacity)
                found.append(PlanPart.exact(plan, segment.position, segment.end, segment.start))
        lane = self.lane
        lane.length = max(0, plan.prefix_end - lane.position)
        return [*found, PlanPart.exact(plan, lane.position, lane.end, lane.start)]

    def set_missing(self, positions: np.ndarray) -> None:
        """Have the sorted `positions` `[n]` of its private nodes computed, and no others."""
        for node in self.private_nodes:
            start = node.segment.position
            inside = (positions >= start) & (positions < start + node.segment.capacity)
            node.segment.missing = positions[inside] - start

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All segments before its lane."""
        return (*(node.segment for node in self.node.path), *self.spilled)

    @property
    def spans(self) -> tuple[Span, ...]:
        """The origin of every prompt token. What lay in the arena before was computed for others."""
        if self.stock is not None:
            return (Span(0, len(self.request.prompt), Origin.LIVE, self.stock.reason),)
        plan = self.plan
        planned = plan.spans(self.recomputed)
        if self.in_place <= plan.prefix_end <= self.computed_from:
            return planned
        end = min(max(plan.prefix_end, self.in_place), self.computed_from)
        spans = [
            replace(span, end=min(span.end, end))
            for span in planned
            if span.origin is not Origin.LIVE and span.start < end
        ]
        if plan.prefix_end < end:
            spans.append(Span(plan.prefix_end, end, Origin.EXACT, SHARED_REASON))
        if end < self.exact_tokens:
            spans.append(Span(end, self.exact_tokens, Origin.LIVE, plan.reason or LEFT_REASON))
        return (*spans, *(span for span in planned if span.start >= self.exact_tokens))


class StockDecoder:
    """Runs one sequence outside the arena, on stock attention and a stock cache; `reason` says why."""

    def __init__(self, model: Any, reason: str) -> None:
        self.reason = reason
        self._model = model
        self._namespace: Namespace | None = None
        self._cache: Any = None

    def next_logits(self, token_ids: np.ndarray, namespace: Namespace) -> torch.Tensor:
        """Logits `[vocab]` behind `token_ids` `[tokens]`; `namespace` is that of the model as it is now."""
        if self._cache is None or namespace != self._namespace or namespace.gated:
            self._cache, self._namespace = DynamicCache(config=text_config(self._model)), namespace
        device = self._model.get_input_embeddings().weight.device
        ids = torch.from_numpy(token_ids[self._cache.get_seq_length() :]).to(device).unsqueeze(0)
        with decode.running(self._model, fast=False, was_read=True):
            output = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = output.logits[0, -1]
        return logits
