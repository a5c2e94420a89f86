"""One request in a scheduler, driven to its end by the thread that asks for it.

Tokens go to the request's streamer as they come. Knows the engine's batch and requests, no queue.
"""

from __future__ import annotations

import torch

from kvboost.batching.resident import ResidentBatch
from kvboost.batching.scheduler import Scheduler
from kvboost.identity.model_state import ModelState
from kvboost.models import GenerationResult
from kvboost.parts.engine_parts import EngineParts
from kvboost.requests.request import Request


class _Heard:
    """Hears of one request in a scheduler, and hands its tokens to the request's streamer."""

    def __init__(self, request: Request) -> None:
        self._streamer = request.options.call_options.get("streamer")
        self.result: GenerationResult | None = None
        self.error: Exception | None = None

    @property
    def is_over(self) -> bool:
        return self.result is not None or self.error is not None

    @property
    def has_told(self) -> bool:
        """Whether anybody else heard of the request."""
        return self._streamer is not None

    def begin(self, request: Request) -> None:
        """As `generate` does, the streamer is given the prompt first."""
        if self._streamer is not None:
            self._streamer.put(torch.from_numpy(request.token_ids).unsqueeze(0))

    def token(self, token_id: int) -> None:
        if self._streamer is not None:
            self._streamer.put(torch.tensor([token_id]))

    def done(self, result: GenerationResult) -> None:
        self.result = result
        if self._streamer is not None:
            self._streamer.end()

    def failed(self, error: Exception) -> None:
        self.error = error


def answer_one(parts: EngineParts, resident: ResidentBatch, request: Request) -> GenerationResult | None:
    """Answer a request in the engine's own batch; None where it must run alone, or the batch is taken."""
    if parts.why_alone(request):
        return None
    state = parts.fit.begin([request])
    scheduler = None if parts.why_alone(request) else resident.take(restarts=False)
    if scheduler is None:
        return None
    try:
        fits = scheduler.needed(request) <= scheduler.max_tokens
        return _driven(scheduler, request, state) if fits else None
    finally:
        resident.give_back(scheduler)


def _driven(scheduler: Scheduler, request: Request, state: ModelState) -> GenerationResult | None:
    """Run one request, for which the model was read, to its end, or to where it is cancelled.

    None where a step failed before anybody heard of a token: alone it needs less memory.
    """
    heard = _Heard(request)
    heard.begin(request)
    failed_steps = scheduler.counts.failed_steps
    sequence = scheduler.join(request, heard, state=state)
    scheduler.step(state)
    while not heard.is_over:
        if request.watch.cancelled.is_set() and sequence.has_spoken:
            scheduler.leave(sequence)
        else:
            scheduler.step()
    if heard.error is not None:
        if scheduler.counts.failed_steps > failed_steps and not heard.has_told:
            return None
        raise heard.error
    assert heard.result is not None
    return heard.result
