"""Many requests: which of them run together, in which order, and what becomes of the rest when one fails.

Requests are sorted by their tokens, so that those that share the most are adjacent, and cut into batches
that fit the memory. What cannot run beside others runs alone, as `generate` would run it. Knows how to ask
for answers, not how they are made.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import torch

from kvboost.batching.fixed_batch import ModelChangedError, Outcome
from kvboost.batching.prefixes import split_into_batches
from kvboost.errors import InvalidRequestError, PartialResultsError
from kvboost.kv.layout import KVLayout
from kvboost.requests.request import Request

MAX_SEQUENCES = 64  # beyond this the time of a step grows in proportion, and first tokens come later
_MEMORY_SHARE = 4  # of the free memory, the KV of one batch takes at most this fraction
_MIN_TOKENS = 4_096


def default_batch_tokens(layout: KVLayout) -> int:
    """Tokens of KV that one batch may hold, by the free memory of the model's device."""
    device = layout.slabs[0].device
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        import psutil

        free = psutil.virtual_memory().available
    return max(_MIN_TOKENS, int(free) // _MEMORY_SHARE // layout.bytes_per_token)


def check_batch_tokens(max_batch_tokens: object) -> None:
    """Refuse a `max_batch_tokens` that is not None or a positive integer."""
    if max_batch_tokens is None:
        return
    if not isinstance(max_batch_tokens, int) or isinstance(max_batch_tokens, bool) or max_batch_tokens < 1:
        raise InvalidRequestError(
            f"max_batch_tokens must be None or an integer of at least 1, got {max_batch_tokens!r}"
        )


R = TypeVar("R", bound=Request)
Result = TypeVar("Result")


class Workload(Generic[R, Result]):
    """Runs requests: `alone` answers one, `together` those of one batch, from `min_sequences` on.

    `begin` reads what the model is when a batch begins. `why_alone` says why a request cannot share a
    batch; empty where it can.
    """

    def __init__(
        self,
        layout: KVLayout,
        begin: Callable[[Sequence[R]], None],
        alone: Callable[[R], Result],
        together: Callable[[Sequence[R]], Iterator[Outcome[Result]]],
        why_alone: Callable[[R], str],
        *,
        min_sequences: int,
    ) -> None:
        self._min_sequences = min_sequences
        self._layout = layout
        self._begin = begin
        self._alone = alone
        self._together = together
        self._why_alone = why_alone

    def outcomes(
        self, requests: Sequence[R], *, unshared_alone: bool, max_batch_tokens: int | None
    ) -> Iterator[Outcome[Result]]:
        """What became of each request, as they finish."""
        max_tokens = max_batch_tokens or default_batch_tokens(self._layout)
        batches = split_into_batches(
            [request.token_ids for request in requests],
            [request.limit for request in requests],
            [request.needed for request in requests],
            max_tokens=max_tokens,
            max_sequences=MAX_SEQUENCES,
            unshared_alone=unshared_alone,
        )
        for batch in batches:
            chosen = [requests[index] for index in batch]
            self._begin(chosen)
            together = [request for request in chosen if not self._why_alone(request)]
            if len(together) < self._min_sequences:
                together = []
            left = {request.index: request for request in chosen}
            for outcome in self._run_together(together):
                del left[outcome.index]
                yield outcome
            for request in left.values():
                yield self._run_alone(request)

    def _run_together(self, requests: Sequence[R]) -> Iterator[Outcome[Result]]:
        """Outcomes of a batch, as far as it gets; what is left then may run alone, with a warning."""
        if not requests:
            return
        try:
            yield from self._together(requests)
        except ModelChangedError:
            return  # those without an answer begin anew
        except Exception as error:  # mostly OOM: one request needs less, or says what is wrong
            warnings.warn(
                f"a batch of {len(requests)} prompts failed ({type(error).__name__}: {error}); those "
                "without an answer run one by one. A smaller max_batch_tokens may help",
                RuntimeWarning,
                stacklevel=2,
            )

    def _run_alone(self, request: R) -> Outcome[Result]:
        try:
            return Outcome(request.index, self._alone(request))
        except Exception as error:
            return Outcome(request.index, error)


def collected(outcomes: Iterator[Outcome[Result]], count: int) -> list[Result]:
    """All results in the order of their requests; where some failed, an error that carries the others."""
    found = dict(streamed(outcomes, count))
    return [found[index] for index in range(count)]


def streamed(outcomes: Iterator[Outcome[Result]], count: int) -> Iterator[tuple[int, Result]]:
    """Index and result of each request as they come; those that failed are told at the end."""
    results: list[Result | None] = [None] * count
    failures: dict[int, Exception] = {}
    for outcome in outcomes:
        if isinstance(outcome.result, Exception):
            failures[outcome.index] = outcome.result
        else:
            results[outcome.index] = outcome.result
            yield outcome.index, outcome.result
    if failures:
        raise PartialResultsError(results, failures) from failures[min(failures)]


def shown(
    outcomes: Iterator[Outcome[Result]], count: int, progress: bool | None
) -> Iterator[Outcome[Result]]:
    """The outcomes with a progress bar; by default only where someone watches."""
    if not (sys.stderr.isatty() if progress is None else progress):
        yield from outcomes
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("answering", total=count)
        for outcome in outcomes:
            bar.advance(task)
            yield outcome
