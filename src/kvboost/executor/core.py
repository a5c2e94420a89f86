"""The core of an engine: its parts, and the executors that run requests on them.

Servers and proofs use it directly; it is not public. Knows checked requests, and not the arguments of public
calls.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kvboost.batching import batch_memory, many
from kvboost.batching.batch_memory import BatchMemory
from kvboost.batching.many import ManyRunner, Outcome
from kvboost.batching.resident import ResidentBatch
from kvboost.batching.scheduler import Scheduler
from kvboost.batching.single import answer_one
from kvboost.choices import GenerationMode, Origin
from kvboost.errors import InvalidRequestError
from kvboost.executor.alone import AloneRunner
from kvboost.executor.documents import DocumentWarmer
from kvboost.executor.own_loop import OwnLoop
from kvboost.executor.reuse_notice import ReuseNotice
from kvboost.executor.warming import Warmer
from kvboost.identity.namespace import Namespace
from kvboost.kv.arena import Arena
from kvboost.models import GenerationResult, ScoreResult, Span
from kvboost.parts.engine_parts import EngineParts
from kvboost.requests.encoding import UNBOUNDED, ReadingBounds
from kvboost.requests.prompts import Prompt, TokenizedPrompt
from kvboost.requests.request import Arguments, Request
from kvboost.requests.stream import TextStream
from kvboost.reuse.explain import Explanation, explain_plan, explain_spans
from kvboost.run.step_tables import Size
from kvboost.settings import EngineArguments, EngineSettings

_log = logging.getLogger(__name__)
_RUNNING_BATCH_TOKENS = 65_536
_LOOKING_S = 10.0  # that all prompts of a call wait for other machines together
_MAX_SEQUENCES = {"cpu": 32, "cuda": 64}


class EngineCore:
    """The executors of one engine, on its parts."""

    def __init__(self, arguments: EngineArguments, *, engine_class: Callable[..., Any]) -> None:
        """`engine_class` makes further engines on the same model, for checks and calibration."""
        self.engine_class = engine_class
        model, tokenizer = arguments.model, arguments.tokenizer
        settings = EngineSettings(**arguments.engine_options)
        self.parts = parts = EngineParts(model, tokenizer, settings, strict=arguments.strict)
        self.warmer = Warmer(parts)
        self.documents = DocumentWarmer(parts, self.warmer)
        self.alone = AloneRunner(parts, self.warmer)
        self.notice = ReuseNotice(overlap=settings.overlap_k > 0)
        self.own_loop = OwnLoop(parts, self.warmer, self.notice.warn)
        self.resident = ResidentBatch(parts, many.default_batch_tokens)
        parts.arena_holders.append(self.resident)
        self.many = ManyRunner(parts, self.resident, parts.why_alone)
        _log_made(parts)

    def tokenize(
        self,
        prompt: Prompt,
        cache_salt: str | None,
        *,
        warming: bool = False,
        bounds: ReadingBounds = UNBOUNDED,
    ) -> TokenizedPrompt:
        """What the model would read for `prompt`; with `warming`, what `warm` reads."""
        return self.parts.reader.read(prompt, self.parts.salt(cache_salt), warming=warming, bounds=bounds)

    def stored_as(self, text: Prompt, cache_salt: str | None) -> tuple[np.ndarray, Namespace]:
        """The ids `[tokens]` that `warm` reads for `text`, and the namespace of their KV."""
        salt = self.parts.salt(cache_salt)
        return self.parts.reader.read(text, salt, warming=True).token_ids, self.parts.fit.namespace(salt)

    def read(self, prompt: Prompt | TokenizedPrompt, arguments: Arguments) -> Request:
        """Check one request without running it."""
        started = time.perf_counter()
        repair = self.parts.approximation.repair(*arguments.repair)
        namespace = self.parts.fit.last_namespace(self.parts.salt(arguments.cache_salt))
        return self.parts.requests.read(prompt, arguments, namespace, started, repair)

    def look_ahead(self, requests: Sequence[Request]) -> None:
        """Fetch what other machines have read of prompts, before they run and outside of the model's lock.

        The waits of many prompts add up: after a while the rest is left to be computed.
        """
        until = time.monotonic() + _LOOKING_S
        for request in requests if self.parts.remote is not None else ():
            if time.monotonic() < until:
                self.parts.look_ahead(request)

    def serve(self, request: Request) -> GenerationResult:
        """Answer one request: in the engine's own batch where there is one and it may, else alone."""
        self.look_ahead([request])
        result = answer_one(self.parts, self.resident, request) if self.resident.exists else None
        return result if result is not None else self.alone.serve(request)

    def stream(self, prompt: Prompt, arguments: Arguments) -> TextStream:
        """Check one request, and answer it piece by piece in a thread of its own."""
        if "streamer" in arguments.options:
            raise InvalidRequestError(
                "stream brings its own streamer; use generate(..., streamer=...) for yours"
            )
        stream = TextStream(self.parts.tokenizer)
        options = {**arguments.options, "streamer": stream.streamer}
        request = self.read(prompt, dataclasses.replace(arguments, options=options))
        if request.options.num_sequences > 1:
            raise InvalidRequestError(f"stream works with num_beams=1, got {request.options.num_sequences}")
        stream.start(lambda: self.serve(request), request.watch.cancelled, self.notice.told)
        return stream

    def outcomes(
        self,
        prompts: Sequence[Prompt],
        arguments: Arguments,
        max_batch_tokens: int | None,
        *,
        unshared_alone: bool,
    ) -> Iterator[Outcome[GenerationResult]]:
        """Check requests that have the same arguments, now, and answer them as they are taken."""
        started = time.perf_counter()
        many.check_batch_tokens(max_batch_tokens)
        repair = self.parts.approximation.repair(*arguments.repair)
        namespace = self.parts.fit.last_namespace(self.parts.salt(arguments.cache_salt))
        requests = self.parts.requests.read_all(prompts, arguments, namespace, started, repair)
        self.look_ahead(requests)
        outcomes = self.many.outcomes(
            many.generate_jobs(requests),
            self.alone.serve,
            at_least=2,
            unshared_alone=unshared_alone,
            max_batch_tokens=max_batch_tokens,
        )
        return self.notice.over(outcomes)

    def scores(
        self,
        prompts: Sequence[Prompt],
        continuations: Sequence[Prompt],
        arguments: Arguments,
        max_batch_tokens: int | None,
    ) -> Iterator[Outcome[ScoreResult]]:
        """Check pairs of a prompt and a continuation, now, and score them as they are taken."""
        started = time.perf_counter()
        many.check_batch_tokens(max_batch_tokens)
        repair = self.parts.approximation.repair(*arguments.repair)
        namespace = self.parts.fit.last_namespace(self.parts.salt(arguments.cache_salt))
        requests = self.parts.requests.read_scores(
            prompts, continuations, arguments, namespace, started, repair
        )
        self.look_ahead(requests)
        jobs = many.score_jobs(requests, self.parts.reader.decode)
        outcomes = self.many.outcomes(jobs, self.alone.score, max_batch_tokens=max_batch_tokens)
        return self.notice.over(outcomes)

    def scheduler(self, max_sequences: int | None = None, max_tokens: int | None = None) -> Scheduler:
        """A running batch that requests join and leave at any step; drive it from one thread.

        It holds at most `max_sequences` requests (default 32, on a GPU 64) and the KV of `max_tokens`
        tokens (default 65,536, or what a quarter of the free memory holds).
        """
        layout, lane = self.parts.layout, batch_memory.LANE_TOKENS
        if max_sequences is None:
            max_sequences = _MAX_SEQUENCES.get(layout.slabs[0].device.type, _MAX_SEQUENCES["cpu"])
        if max_tokens is None:
            max_tokens = min(_RUNNING_BATCH_TOKENS, many.default_batch_tokens(layout))
        arena = Arena(layout, max_sequences * lane + max_tokens + 1)  # one for captured steps
        scheduler = Scheduler(self.parts, BatchMemory(arena, max_sequences, max_tokens, lane))
        scheduler.capture(Size.all(max_sequences))
        return scheduler

    def explain(self, prompt: Prompt | TokenizedPrompt, arguments: Arguments) -> Explanation:
        """What would be reused of `prompt`, and why the rest would not."""
        parts = self.parts
        request = self.read(prompt, arguments)
        parts.fit.begin([request])
        ids = request.token_ids
        why = parts.why_plain(request) or ("baseline" if request.mode is GenerationMode.BASELINE else "")
        if why:
            spans = (Span(0, len(ids), Origin.LIVE, why),)
            return explain_spans(spans, ids.tolist(), parts.tokenizer.decode, lambda _key: None, None)
        plan = parts.assembler.plan(parts.lookup(request))
        note = plan.refusal or (plan.repair.choice(plan) if plan.repair is not None else "")
        return explain_plan(plan, ids.tolist(), parts.tokenizer.decode, note, parts.seen_elsewhere(request))


def _log_made(parts: EngineParts) -> None:
    settings, slab = parts.settings, parts.layout.slabs[0]
    _log.info(
        "engine for %s, %s on %s: chunk_size=%d, max_chunks=%s, max_cache_bytes=%s, kv_cache_bits=%s, "
        "cache_device=%s, disk_cache_dir=%s, remote_cache=%s",
        parts.model_name,
        str(slab.dtype).removeprefix("torch."),
        slab.device,
        settings.chunk_size,
        settings.max_chunks,
        settings.max_cache_bytes,
        settings.bits,
        settings.cache_device,
        settings.disk_cache_dir,
        parts.remote.store.name if parts.remote is not None else None,
    )
