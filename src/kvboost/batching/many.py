"""Many requests of one call: which of them run together, and what becomes of the rest when one fails.

Requests are sorted by their tokens, so that those that share the most join a scheduler together, as far as
the memory goes. What cannot run beside others runs alone, as `generate` would run it. The caller's
thread drives it; between two steps nothing is held, so that it may stop at any time.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from kvboost.batching.batch_memory import LANE_TOKENS, BatchMemory, spill_tokens
from kvboost.batching.prefixes import MIN_SHARED_TOKENS, common_tokens, sorted_by_tokens
from kvboost.batching.resident import ResidentBatch
from kvboost.batching.scheduler import Scheduler
from kvboost.batching.scores import Scores
from kvboost.batching.sequence import ModelChangedError
from kvboost.choices import GenerationMode
from kvboost.errors import InvalidRequestError, PartialResultsError
from kvboost.identity.model_state import ModelState
from kvboost.kv.layout import KVLayout
from kvboost.models import GenerationResult
from kvboost.parts.engine_parts import EngineParts
from kvboost.requests.request import Request, ScoreRequest

MAX_SEQUENCES = 64  # beyond this the time of a step grows in proportion, and first tokens come later
_MEMORY_SHARE = 4  # of the free memory, the KV of one batch takes at most this fraction
_MIN_TOKENS = 4_096
_USUAL = 0.9  # as many run at once as fit for this share of neighbours
_NO_TOKENS = np.zeros(0, dtype=np.int64)


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


@dataclasses.dataclass
class BatchCounts:
    """Batches that were begun, and the KV memory of the largest, beside that of a copy for every sequence.

    Their prompts (`sequences`), and the prompt tokens that another one had in the batch already.
    """

    batches: int = 0
    sequences: int = 0
    shared_tokens: int = 0
    largest_kv_bytes: int = 0
    largest_kv_bytes_if_copied: int = 0


Result = TypeVar("Result")
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Outcome(Generic[Result]):
    """What became of request number `index`: a result, or why there is none."""

    index: int
    result: Result | Exception


class Job(Generic[Result]):
    """A request that may join a scheduler, for those of the caller's that need the same forwards.

    It listens to the scheduler, and gathers what becomes of them.
    """

    def __init__(self, request: Request, members: Sequence[Request], scores: Sequence[Scores] = ()) -> None:
        self.request = request
        self.members = members
        self.outcomes: list[Outcome[Result]] = []
        self.error: Exception | None = None
        self.in_tree: int | None = None  # prompt tokens that others may share, if the others go into a lane
        self.scores = scores

    def token(self, token_id: int) -> None:
        """Tokens are taken from the result."""

    def add_logits(self, position: int, logits: torch.Tensor) -> None:
        """Take logits `[n, vocab]` of the tokens from `position` on."""
        for scores in self.scores:
            scores.add(position, logits)

    def done(self, result: GenerationResult) -> None:
        found: list[Any] = [scores.result(result.spans) for scores in self.scores] or [result]
        self.outcomes = [
            Outcome(member.index, each) for member, each in zip(self.members, found, strict=True)
        ]

    def failed(self, error: Exception) -> None:
        self.error = error

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be heard of it."""
        return bool(self.outcomes) or self.error is not None


def generate_jobs(requests: Sequence[Request]) -> list[Job[Any]]:
    """Each request by itself."""
    return [Job(request, [request]) for request in requests]


def score_jobs(requests: Sequence[ScoreRequest], decode: Callable[[list[int]], str]) -> list[Job[Any]]:
    """Pairs that need the same forward share it.

    Equal tokens need not be cut alike between prompt and continuation: the earliest cut serves all.
    """
    same: dict[bytes, list[ScoreRequest]] = {}
    for request in requests:
        same.setdefault(request.token_ids.tobytes(), []).append(request)
    return [
        Job(min(each, key=lambda one: one.limit), each, [Scores(one, decode) for one in each])
        for each in same.values()
    ]


class ManyRunner:
    """Runs many requests; `why_alone` says why one cannot share a batch."""

    def __init__(self, parts: EngineParts, resident: ResidentBatch, why_alone: Callable[[Any], str]) -> None:
        self._parts = parts
        self._resident = resident
        self._why_alone = why_alone
        self.counts = BatchCounts()

    def outcomes(
        self,
        jobs: Sequence[Job[Result]],
        alone: Callable[[Any], Result],
        *,
        max_batch_tokens: int | None,
        at_least: int = 1,
        unshared_alone: bool = False,
    ) -> Iterator[Outcome[Result]]:
        """What became of each request, as they finish; `alone` answers or scores one by itself.

        Fewer than `at_least` do not run together; with `unshared_alone`, neither do those that share fewer
        than `MIN_SHARED_TOKENS` tokens with any other.
        """
        self._parts.fit.begin([job.request for job in jobs])
        order = [jobs[index] for index in sorted_by_tokens([job.request.token_ids for job in jobs])]
        together = [job for job in order if not self._why_alone(job.request)]
        if unshared_alone and not self._resident.exists:
            together = _sharing(together)
        if len(together) < at_least:
            together = []
        batched = set(map(id, together))
        for job in [job for job in order if id(job) not in batched]:
            yield from self._run_alone(job, alone)
        for job in self._run_together(together, max_batch_tokens):
            yield from job.outcomes or self._run_alone(job, alone)

    def _run_together(
        self, jobs: Sequence[Job[Result]], max_batch_tokens: int | None
    ) -> Iterator[Job[Result]]:
        """The jobs as they finish; those without an outcome are to run alone."""
        if max_batch_tokens is None and (resident := self._resident.take(restarts=True)) is not None:
            try:
                yield from self._run_resident(resident, jobs)
            except GeneratorExit:  # whoever takes the answers has stopped, or is garbage that is collected
                self._resident.abandon()
                raise
            except BaseException:
                self._resident.give_back(resident)
                raise
            self._resident.give_back(resident)
            return
        most_tokens = max_batch_tokens or default_batch_tokens(self._parts.layout)
        size = Size.of(jobs, most_tokens)
        waiting: deque[Job[Result]] = deque()
        for job in jobs:
            if size.holds(job):
                waiting.append(job)
            else:
                yield job
        if not waiting:
            return
        workspace = self._parts.workspace
        arena = workspace.take(size.slots, "", _NO_TOKENS)[0]
        memory = BatchMemory(arena, size.sequences, size.tokens, size.lane_tokens)
        scheduler = Scheduler(self._parts, memory, offline=True)
        try:
            yield from self._drive(scheduler, size, waiting)
        finally:
            workspace.give_back(arena, "", _NO_TOKENS)

    def _run_resident(self, scheduler: Scheduler, jobs: Sequence[Job[Result]]) -> Iterator[Job[Result]]:
        """The same in the engine's own batch."""
        memory = scheduler.memory
        size = Size.of(jobs, memory.max_slots, memory.lane_tokens)
        waiting: deque[Job[Result]] = deque()
        for job in jobs:
            if Size(memory.max_sequences, memory.max_tokens, memory.lane_tokens).holds(job):
                waiting.append(job)
            else:
                yield job
        if waiting:
            yield from self._drive(scheduler, size, waiting)

    def _drive(self, scheduler: Scheduler, size: Size, waiting: deque[Job[Result]]) -> Iterator[Job[Result]]:
        self._count(size, [job.request for job in waiting])
        before = scheduler.counts.shared_tokens
        try:
            yield from _driven(scheduler, waiting)
        finally:
            self.counts.shared_tokens += scheduler.counts.shared_tokens - before

    def _count(self, size: Size, requests: Sequence[Request]) -> None:
        counts, bytes_per_token = self.counts, self._parts.layout.bytes_per_token
        nbytes = size.slots * bytes_per_token
        counts.batches += 1
        counts.sequences += len(requests)
        if nbytes > counts.largest_kv_bytes:
            copied = max(request.needed for request in requests) * min(size.sequences, len(requests))
            counts.largest_kv_bytes = nbytes
            counts.largest_kv_bytes_if_copied = copied * bytes_per_token

    @staticmethod
    def _run_alone(job: Job[Result], alone: Callable[[Any], Result]) -> Iterator[Outcome[Result]]:
        for member in job.members:
            yield Outcome(member.index, _result_or_error(alone, member))


def _driven(scheduler: Scheduler, waiting: deque[Job[Result]]) -> Iterator[Job[Result]]:
    """Have all that wait join as soon as there is room, and run steps; the jobs as they finish."""
    running: list[Job[Result]] = []
    has_left = True  # otherwise there is no more room than before
    while waiting or running:
        state: ModelState | None = None  # for those that join together, it is read once
        while waiting and has_left and scheduler.has_room(waiting[0].request, in_tree=waiting[0].in_tree):
            job = waiting.popleft()
            if _joins(scheduler, job, state):
                running.append(job)
                state = scheduler.state
            else:
                yield job
                state = None
        if not running:
            if waiting:
                yield waiting.popleft()
            continue
        _step(scheduler, running)
        over = [job for job in running if job.is_over]
        running = [job for job in running if not job.is_over]
        has_left = bool(over)
        yield from over


def _result_or_error(alone: Callable[[Any], Result], request: Request) -> Result | Exception:
    try:
        return alone(request)
    except Exception as error:
        return error


def _joins(scheduler: Scheduler, job: Job[Any], state: ModelState | None) -> bool:
    """Have a job join; where that fails, whoever runs it alone hears why."""
    try:
        scores = job.add_logits if job.scores else None
        scheduler.join(job.request, job, scores=scores, in_tree=job.in_tree, state=state)
    except Exception:  # no room after all, a processor that cannot be made, a model that has changed
        return False
    return True


def _step(scheduler: Scheduler, running: Sequence[Job[Any]]) -> None:
    """One step; those that fail in it have an error as their outcome, unless the step was to blame."""
    failed_steps = scheduler.counts.failed_steps
    scheduler.step()
    failed = [job for job in running if job.error is not None]
    if scheduler.counts.failed_steps > failed_steps:  # mostly OOM: one request needs less
        error, prompts = failed[0].error, sum(len(job.members) for job in failed)
        warnings.warn(
            f"a batch of {prompts} prompts failed ({type(error).__name__}: {error}); those "
            "without an answer run one by one. A smaller max_batch_tokens may help",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    for job in failed:
        assert job.error is not None
        if not isinstance(job.error, ModelChangedError):
            job.outcomes = [Outcome(member.index, job.error) for member in job.members]


class Size(NamedTuple):
    """Of a batch: sequences at once, slots for prompts and for long answers, and slots of a lane."""

    sequences: int
    tokens: int
    lane_tokens: int

    @property
    def slots(self) -> int:
        return self.sequences * self.lane_tokens + self.tokens

    def holds(self, job: Job[Any]) -> bool:
        """Whether a request fits if nothing else runs."""
        if job.in_tree is not None:
            return job.in_tree <= self.tokens
        if (
            isinstance(job.request, ScoreRequest)
            and job.request.needed - job.request.limit > self.lane_tokens
        ):
            return False  # what is scored does not spill
        return job.request.limit + spill_tokens(job.request, self.lane_tokens) <= self.tokens

    @classmethod
    def of(cls, jobs: Sequence[Job[Any]], most_slots: int, lane_tokens: int | None = None) -> Size:
        """For jobs sorted by their tokens: as many at once as fit `most_slots` slots.

        Where the end of a prompt that no other shares fits into a lane, it will go there. Lanes have
        `lane_tokens` slots; None = what these jobs need.
        """
        if not jobs:
            return cls(0, 0, 0)
        requests = [job.request for job in jobs]
        limits = np.array([request.limit for request in requests])
        shared = np.array([0, *(_shared(*pair) for pair in pairwise(requests))])
        in_tree = np.maximum(shared, np.append(shared[1:], 0))
        behind = np.array([request.needed - request.limit for request in requests])
        wanted, can_spill = limits - in_tree + behind, not isinstance(requests[0], ScoreRequest)
        least = int(behind.max()) if not can_spill else min(LANE_TOKENS, int(behind.max()))
        lane = lane_tokens or int(wanted[wanted <= max(least, LANE_TOKENS)].max(initial=least))
        is_exact = np.array([request.mode is not GenerationMode.CHUNK_KV_REUSE for request in requests])
        in_lane = is_exact & (wanted <= lane)
        for job, fits, tokens in zip(jobs, in_lane.tolist(), in_tree.tolist(), strict=True):
            job.in_tree = tokens if fits else None
        spilled = np.array([spill_tokens(request, lane) for request in requests])
        own = np.where(in_lane, in_tree, limits + spilled) - shared
        repaired = int(np.where(is_exact, 0, shared).sum())  # what is repaired is not shared
        ends = np.cumsum([0, *own])
        sequences = min(MAX_SEQUENCES, len(jobs))
        while sequences > 1:
            needed = ends[sequences:] - ends[:-sequences] + shared[: len(jobs) - sequences + 1]
            if np.quantile(needed, _USUAL) + sequences * lane <= most_slots:
                break
            sequences -= max(1, sequences // 4)
        nested = int(((shared > 0) & (in_tree > shared)).sum())  # a short part behind another is not shared
        all_tokens = int(ends[-1]) + MIN_SHARED_TOKENS * nested + repaired
        return cls(sequences, min(all_tokens, most_slots - sequences * lane), lane)


def _shared(first: Request, second: Request) -> int:
    """Prompt tokens that two requests may share in a batch."""
    common = min(common_tokens(first.token_ids, second.token_ids), first.limit, second.limit)
    return common if common >= MIN_SHARED_TOKENS else 0


def _sharing(jobs: Sequence[Job[Result]]) -> list[Job[Result]]:
    """Those of sorted `jobs` that share text with another; text that has moved may be shared anywhere."""
    shared = [0, *(_shared(first.request, second.request) for first, second in pairwise(jobs)), 0]
    return [
        job
        for job, beside in zip(jobs, pairwise(shared), strict=False)
        if any(beside) or job.request.mode is GenerationMode.CHUNK_KV_REUSE
    ]


# --- results -------------------------------------------------------------------------------------


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


def shown(outcomes: Iterator[T], count: int, progress: bool | None, what: str = "answering") -> Iterator[T]:
    """The outcomes with a progress bar; by default only where someone watches."""
    if not (sys.stderr.isatty() if progress is None else progress):
        yield from outcomes
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=count)
        for outcome in outcomes:
            bar.advance(task)
            yield outcome
