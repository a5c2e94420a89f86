"""What the routes share: the engine, its worker, who may ask, and what was counted.

Made once per application. Knows no route.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, TypeVar

from anyio import CapacityLimiter, to_thread
from fastapi import Depends
from fastapi import Request as HttpRequest

from kvboost.choices import GenerationMode
from kvboost.engine import InferenceEngine
from kvboost.errors import InvalidRequestError
from kvboost.executor.documents import DocumentPlan
from kvboost.models import GenerationResult
from kvboost.requests.encoding import ReadingBounds
from kvboost.requests.prompts import TokenizedPrompt
from kvboost.requests.request import Arguments, Request
from kvboost.server.answers import (
    BatchBody,
    CacheStats,
    ChunkBody,
    RecentRequest,
    RequestsBody,
    Usage,
    WorkerBody,
)
from kvboost.server.asgi import unless_gone
from kvboost.server.auth import Caller, Gate, effective_salt
from kvboost.server.cache_schemas import WarmRequest
from kvboost.server.errors import ApiError, as_api_error, bad_field
from kvboost.server.metrics import Metrics
from kvboost.server.readers import Readers, Reading, read_body
from kvboost.server.schemas import AnyPrompt, Reuse
from kvboost.server.settings import ServerSettings
from kvboost.server.tickets import ShuttingDownError, Ticket, TokenQueue
from kvboost.server.tokens import TokenNames
from kvboost.server.worker import Worker
from kvboost.store.forest import without_tokens

T = TypeVar("T")
_RECENT = 200
_LEAST_READING = 16  # requests of a tenant that may be read at once, however few may wait
_LOOKERS = 2  # threads for statistics
_CHARACTERS_PER_TOKEN = 16  # more than any prompt has on average, except runs of spaces


class Service:
    """One engine behind one queue."""

    def __init__(self, engine: InferenceEngine, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.gate = Gate(settings)
        self.worker = Worker(
            engine,
            batching=settings.batching,
            max_sequences=settings.max_sequences,
            batch_tokens=settings.batch_tokens,
            max_waiting=settings.max_waiting,
            max_waiting_per_tenant=settings.share_of_the_queue,
            has_tenants=settings.has_tenants,
        )
        self.readers = Readers(
            max(settings.share_of_the_queue, _LEAST_READING),
            settings.max_request_bytes,
            lambda: self.worker.tenants,
        )
        self._looking = CapacityLimiter(_LOOKERS)
        scheduler = self.worker.scheduler
        self.max_prompt_tokens = self._max_prompt_tokens()
        self._batch_slots = 0 if scheduler is None else scheduler.radix_tree.pool.free
        self.metrics = Metrics(self.worker, engine.cache_stats)
        self.created = int(time.time())
        # Tokenizers are not thread-safe: the event loop, which decodes, has its own.
        self._tokenizer = copy.deepcopy(engine.tokenizer)
        self.names = TokenNames(self._tokenizer)
        self._started = time.monotonic()
        self._recent: deque[RecentRequest] = deque(maxlen=_RECENT)
        self._count = self._prompt_tokens = self._cached_tokens = 0
        self._is_ending = threading.Event()

    def _max_prompt_tokens(self) -> int | None:
        """Tokens of the longest prompt that could be served; None = there is no bound."""
        engine, scheduler = self.engine, self.worker.scheduler
        sizes = [engine.max_positions]
        if scheduler is not None and not engine.core.parts.why_alone(
            engine.core.read([0], Arguments(1, self.settings.mode))
        ):
            sizes.append(scheduler.max_tokens)
        return min((size for size in sizes if size is not None), default=None)

    # --- requests ----------------------------------------------------------------------------

    async def read(self, request: HttpRequest, caller: Caller, work: Callable[[bytes, Reading], T]) -> T:
        """What `work` makes of a request's body, in a thread; cancelled where the client goes away."""
        settings = self.settings
        with self.readers.reading(caller.name, settings.read_timeout_s) as reading:
            raw = await read_body(request, settings.max_request_bytes, reading)
            return await unless_gone(request.receive, reading.run(partial(work, raw, reading)))

    async def look_ahead(self, requests: Sequence[Request]) -> None:
        """Fetch what other machines have read of prompts before they are queued: the batch does not wait."""
        if self.engine.core.parts.remote is not None:
            await to_thread.run_sync(self.engine.core.look_ahead, requests, abandon_on_cancel=True)

    def reuse_of(self, body: Reuse) -> dict[str, Any]:
        """What a request may reuse, as arguments: as it asks, or as the server does."""
        mode = GenerationMode(body.mode or self.settings.mode)
        for field in ("recompute_ratio", "selector"):
            if getattr(body, field) is not None and mode is not GenerationMode.CHUNK_KV_REUSE:
                message = f"says how moved text is repaired, and mode {mode.value!r} reuses none"
                raise bad_field(field, message)
        return {"mode": mode, "repair": (body.recompute_ratio, body.selector)}

    def tokenize(
        self,
        prompt: AnyPrompt,
        salt: str,
        reading: Reading,
        *,
        field: str,
        warming: bool = False,
        is_only_looked_up: bool = False,
    ) -> TokenizedPrompt:
        """Read a prompt, given in `field`; refuses what is certainly too long."""
        reading.go_on()
        self._check_size(prompt, field)
        most = self.engine.max_positions if is_only_looked_up else self.max_prompt_tokens
        bounds = ReadingBounds(most, reading.go_on, apart=True)
        try:
            read = self.engine.core.tokenize(prompt, salt, warming=warming, bounds=bounds)
            read.text  # noqa: B018  # ids become text here, not in the worker's thread
            return read
        except InvalidRequestError as error:
            raise as_api_error(error, field) from error

    def plan_documents(self, body: WarmRequest, salt: str, reading: Reading) -> DocumentPlan:
        """In which texts documents are to be read, so that each of them can be served."""
        behind = None
        if body.has_text:
            behind = self.tokenize(body.text, salt, reading, field=body.prompt_field, warming=True)
        texts = body.documents or []
        for text in texts:
            self._check_size(text, "documents")
        most = self.max_prompt_tokens
        bounds = ReadingBounds(most, reading.go_on, apart=True)
        room = most - 1 if most is not None else None  # a request has a token of answer
        try:
            return self.engine.core.documents.plan(texts, behind, salt, max_tokens=room, bounds=bounds)
        except InvalidRequestError as error:
            raise as_api_error(error, "documents") from error

    def _check_size(self, prompt: AnyPrompt, field: str) -> None:
        most, tokens = self.settings.max_prompt_characters, self.max_prompt_tokens
        if most is None and tokens is not None:
            most = _CHARACTERS_PER_TOKEN * tokens
        if isinstance(prompt, str):
            size = len(prompt)
        else:
            size = sum(len(each["content"]) for each in prompt if isinstance(each, dict))
        if most is not None and size > most:
            message = f"{size} characters are more than the {most} that this server takes; shorten it"
            raise bad_field(field, message, "context_length_exceeded")

    def decode(self, token_ids: list[int]) -> str:
        """The text of generated tokens, as the engine gives it."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def salt_of(self, caller: Caller, request_salt: str | None, key_salt: str | None = None) -> str:
        """Whose cached text a request may see; only the admin may name a key's salt."""
        if key_salt is not None and not caller.is_admin:
            raise ApiError(403, "key_salt needs the admin key", param="key_salt", code="admin_key_required")
        own = caller.salt if key_salt is None else key_salt
        return effective_salt(self.engine.settings.cache_salt, own, request_salt or "")

    def check_model(self, name: str) -> None:
        """Refuse names of other models."""
        settings = self.settings
        if name not in (settings.model_name, *settings.aliases):
            message = f"the model {name[:100]!r} is not here; this server has {settings.model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def check_ready(self) -> None:
        """Raise where no request can be taken."""
        if self._is_ending.is_set():
            raise ShuttingDownError("the server is shutting down")
        if not self.worker.is_alive:
            raise ApiError(503, "the thread that runs the model has ended", code="worker_ended")

    def submit(
        self,
        request: Request,
        caller: Caller,
        *,
        param: str,
        answers: bool = True,
        queue: TokenQueue | None = None,
    ) -> Ticket:
        """Queue a request; where the running batch has no room for it, the error names the field `param`."""
        tenant, timeout_s = caller.name, self.settings.timeout_s
        try:
            return self.worker.submit(
                request, tenant=tenant, timeout_s=timeout_s, answers=answers, queue=queue
            )
        except InvalidRequestError as error:
            raise bad_field(param, error, "context_length_exceeded") from error

    def count_answer(self, first: GenerationResult, usage: Usage) -> None:
        """Count a completion whose first choice is `first`."""
        cached = usage.prompt_tokens_details.cached_tokens
        recent = RecentRequest(
            at=time.time(),
            ttft_ms=first.ttft_ms,
            total_ms=first.total_ms,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=cached,
            completion_tokens=usage.completion_tokens,
        )
        self.metrics.count_answer(recent)
        self._count += 1
        self._prompt_tokens += usage.prompt_tokens
        self._cached_tokens += cached
        self._recent.append(recent)

    # --- what is going on --------------------------------------------------------------------

    async def look(self, question: Callable[[], T]) -> T:
        """The result of `question`, run in a thread that no request can keep busy."""
        return await to_thread.run_sync(question, limiter=self._looking)

    def stats(self, chunks: int, with_texts: bool) -> CacheStats:
        """Numbers of this moment, with the `chunks` most used chunks. From any thread.

        Their texts are included only with both `log_prompts` and `with_texts`.
        """
        found = CacheStats(
            model=self.settings.model_name,
            mode=self.settings.mode_name,
            uptime_s=time.monotonic() - self._started,
            worker=WorkerBody(**vars(self.worker.stats)),
            batch=self._batch_stats(),
            requests=RequestsBody(
                count=self._count,
                hit_share=self._cached_tokens / self._prompt_tokens if self._prompt_tokens else 0.0,
                recent=list(self._recent),
            ),
            cache=self.engine.cache_stats(),
        )
        if chunks:
            texts = with_texts and self.settings.log_prompts
            found.chunks = [_chunk_body(each, texts) for each in self.engine.cache_manager.most_used(chunks)]
        return found

    def _batch_stats(self) -> BatchBody | None:
        scheduler = self.worker.scheduler
        if scheduler is None:
            return None
        return BatchBody(
            **vars(scheduler.counts),  # of which it takes those that it has fields for
            sequences=len(scheduler.sequences),
            max_sequences=scheduler.max_sequences,
            resident_tokens=self._batch_slots - scheduler.radix_tree.pool.free,
            kv_bytes=scheduler.nbytes,
        )

    # --- the end -----------------------------------------------------------------------------

    def begin_shutdown(self) -> None:
        """Take no more requests. What runs goes on."""
        self._is_ending.set()

    def close(self, timeout_s: float | None = None) -> None:
        """Finish what runs within the time there is, fail the rest. It can be called twice."""
        self.begin_shutdown()
        self.readers.close()
        self.worker.close(self.settings.shutdown_timeout_s if timeout_s is None else timeout_s)


async def service_of(request: HttpRequest) -> Service:
    """For routes. Async: FastAPI would run a plain function in a thread."""
    service: Service = request.app.state.service
    return service


TheService = Annotated[Service, Depends(service_of)]


def told_reason(reason: str, caller: Caller) -> str:
    """Why a token was not found, without tokens of others' text where `caller` may not see them."""
    return reason if caller.sees_tokens else without_tokens(reason)


def _chunk_body(chunk: Any, with_text: bool) -> ChunkBody:
    return ChunkBody(
        id=chunk.chunk_id,
        tokens=chunk.length,
        uses=chunk.access_count,
        tier="memory" if chunk.kv.is_loaded else "disk",
        age_s=max(0.0, time.time() - chunk.created_at),
        **({"text": chunk.text} if with_text else {}),
    )
