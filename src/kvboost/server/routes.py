"""The routes beside completions: /v1/cache/..., the model's name, health, metrics, and the page's files.

Lookups run in threads beside the model; what must not happen during a step runs in the worker's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import lru_cache, partial
from mimetypes import guess_type
from pathlib import Path
from typing import Annotated, TypeVar

from fastapi import APIRouter, Query, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from kvboost.choices import GenerationMode
from kvboost.errors import InvalidRequestError
from kvboost.executor.documents import DocumentPlan
from kvboost.requests.prompts import TokenizedPrompt
from kvboost.requests.request import Arguments
from kvboost.requests.request import Request as EngineRequest
from kvboost.server.answers import (
    CacheStats,
    ClearBody,
    ExplainBody,
    ExplainedSpanBody,
    ModelBody,
    ModelList,
    PinBody,
    Status,
    Usage,
    WarmBody,
    WarmedDocument,
)
from kvboost.server.asgi import TheNote, unless_gone
from kvboost.server.auth import Admin, AnyCaller, Caller
from kvboost.server.cache_schemas import CacheRequest, ExplainRequest, WarmRequest
from kvboost.server.errors import ApiError, as_api_error
from kvboost.server.readers import Reading, described, parse
from kvboost.server.service import Service, TheService, told_reason
from kvboost.server.tickets import Ticket

T = TypeVar("T")
B = TypeVar("B", bound=CacheRequest)
cache_router = APIRouter(prefix="/v1/cache", tags=["cache"])
router = APIRouter(tags=["server"])
_MAX_CHUNKS_SHOWN = 1000
_PROMPT = described(CacheRequest)
PAGE = Path(__file__).parent / "page"
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@cache_router.get("/stats", summary="Numbers of the server and its cache", response_model_exclude_unset=True)
async def stats(
    service: TheService,
    admin: Admin,
    chunks: Annotated[int, Query(ge=0, le=_MAX_CHUNKS_SHOWN, description="So many chunks, by use.")] = 0,
) -> CacheStats:
    return await service.look(partial(service.stats, chunks, admin.is_admin))


@cache_router.post(
    "/warm",
    summary="Read a prompt or documents once, and keep them",
    openapi_extra=described(WarmRequest),
    response_model_exclude_unset=True,
)
async def warm(request: Request, service: TheService, caller: AnyCaller, note: TheNote) -> WarmBody:
    service.check_ready()
    started = time.perf_counter()

    def read(
        body: WarmRequest, salt: str, reading: Reading
    ) -> tuple[list[EngineRequest], DocumentPlan | None, str]:
        # Exactly, whatever the server's mode is: what attended to moved text would be found by content only.
        exactly = Arguments(1, GenerationMode.PREFIX_CACHE, cache_salt=salt)
        if body.documents is None:
            ids = service.tokenize(body.text, salt, reading, field=body.prompt_field)
            return [service.engine.core.read(ids, exactly)], None, body.prompt_field
        plan = service.plan_documents(body, salt, reading)
        texts = [TokenizedPrompt(window.token_ids, "") for window in plan.windows]
        return [service.engine.core.read(text, exactly) for text in texts], plan, "documents"

    requests, plan, field = await _with_prompt(request, service, caller, read, WarmRequest)
    found = WarmBody(prompt_tokens=0, cached_tokens=0, ms=0.0)
    for each in requests:  # one after the other: the next one finds what they have in common
        await unless_gone(request.receive, service.look_ahead([each]))
        ticket = service.submit(each, caller, param=field, answers=False)
        await unless_gone(request.receive, _through(ticket))
        found.prompt_tokens += ticket.result.prompt_tokens
        found.cached_tokens += ticket.result.cached_tokens
    await _everything_stored(service)
    if plan is not None:
        found.prompt_tokens += plan.held_tokens
        found.cached_tokens += plan.held_tokens
        results = await service.look(partial(service.engine.core.documents.results, plan))
        found.documents = [
            WarmedDocument(tokens=each.token_count, chunks=each.chunks_stored, warning=each.alignment_warning)
            for each in results
        ]
    note.usage = Usage.of(found.prompt_tokens, found.cached_tokens, 0)
    found.ms = (time.perf_counter() - started) * 1e3
    return found


async def _everything_stored(service: Service) -> None:
    """Wait until the step that gave the last answers is over, since it stores them at its end."""
    await asyncio.wrap_future(service.worker.call(lambda: None))


async def _through(ticket: Ticket) -> None:
    try:
        async for _ in ticket:
            pass
    finally:
        ticket.cancel()


@cache_router.post(
    "/explain",
    summary="What would be reused of a prompt, and why",
    openapi_extra=described(ExplainRequest),
)
async def explain(request: Request, service: TheService, caller: AnyCaller) -> ExplainBody:
    def look_up(body: ExplainRequest, salt: str, reading: Reading) -> ExplainBody:
        ids = service.tokenize(body.text, salt, reading, field=body.prompt_field, is_only_looked_up=True)
        reuse = service.reuse_of(body)
        found = service.engine.core.explain(ids, Arguments(1, cache_salt=salt, **reuse))
        return ExplainBody(
            prompt_tokens=found.prompt_tokens,
            cached_tokens=found.cached_tokens,
            choice=found.choice,
            spans=[  # of a span, the body takes what it has fields for
                ExplainedSpanBody(**{**vars(span), "reason": told_reason(span.reason, caller)})
                for span in found.spans
            ],
        )

    return await _with_prompt(request, service, caller, look_up, ExplainRequest)


@cache_router.post("/pin", summary="Keep what is stored of a prompt from eviction", openapi_extra=_PROMPT)
async def pin(request: Request, service: TheService, admin: Admin) -> PinBody:
    return await _change_pin(request, service, admin, service.engine.pin)


@cache_router.post("/unpin", summary="Take a pin back", openapi_extra=_PROMPT)
async def unpin(request: Request, service: TheService, admin: Admin) -> PinBody:
    return await _change_pin(request, service, admin, service.engine.unpin)


async def _change_pin(
    request: Request, service: Service, admin: Caller, change: Callable[..., int]
) -> PinBody:
    def changed(body: CacheRequest, salt: str, reading: Reading) -> PinBody:
        ids = service.tokenize(
            body.text, salt, reading, field=body.prompt_field, warming=True, is_only_looked_up=True
        )
        return PinBody(tokens=change(ids, cache_salt=salt))

    service.check_ready()
    await _everything_stored(service)
    return await _with_prompt(request, service, admin, changed)


@cache_router.post("/clear", summary="Forget all cached text that is not pinned")
async def clear(service: TheService, caller: AnyCaller) -> ClearBody:
    service.gate.check_clear(caller)
    service.check_ready()

    def forget() -> ClearBody:
        if service.worker.scheduler is not None:
            service.worker.scheduler.clear()
        service.engine.clear()
        return ClearBody(chunks=service.engine.cache_stats()["chunks"])

    return await asyncio.wrap_future(service.worker.call(forget))


async def _with_prompt(
    request: Request,
    service: Service,
    caller: Caller,
    work: Callable[[B, str, Reading], T],
    kind: type[B] = CacheRequest,  # type: ignore[assignment]  # a default for a type variable
) -> T:
    """Read a body with a prompt, and do `work` with it and its salt, in a thread."""

    def parsed(raw: bytes, reading: Reading) -> T:
        body = parse(kind, raw, service.settings.max_messages)
        salt = service.salt_of(caller, body.cache_salt, body.key_salt)
        try:
            return work(body, salt, reading)
        except InvalidRequestError as error:
            raise as_api_error(error, body.prompt_field) from error

    return await service.read(request, caller, parsed)


# --- the smaller ones ------------------------------------------------------------------------


def _model_body(service: Service, name: str) -> ModelBody:
    return ModelBody(id=name, object="model", created=service.created, owned_by="kvboost")


@router.get("/v1/models", summary="The model that is served")
async def models(service: TheService, _caller: AnyCaller) -> ModelList:
    return ModelList(object="list", data=[_model_body(service, service.settings.model_name)])


@router.get("/v1/models/{name:path}", summary="The model, by name")
async def model(service: TheService, _caller: AnyCaller, name: str) -> ModelBody:
    service.check_model(name)
    return _model_body(service, name)


@router.get("/health", summary="The process lives")
async def health() -> Status:
    return Status(status="ok")


@router.get("/ready", summary="The server takes requests")
async def ready(service: TheService) -> Status:
    service.check_ready()
    return Status(status="ready")


@router.get(
    "/metrics",
    summary="Numbers for Prometheus",
    response_class=Response,
    responses={200: {"content": {CONTENT_TYPE_LATEST: {"schema": {"type": "string"}}}}},
)
async def metrics(service: TheService, _admin: Admin) -> Response:
    return Response(await service.look(service.metrics.text), media_type=CONTENT_TYPE_LATEST)


@router.get("/", include_in_schema=False)
async def page() -> Response:
    return await page_file("index.html")


@router.get("/page/{name}", include_in_schema=False)
async def page_file(name: str) -> Response:
    found = _page_files().get(name)
    if found is None:
        raise ApiError(404, "the page has no such file", code="not_found")
    return Response(found, media_type=guess_type(name)[0] or "text/plain", headers=PAGE_HEADERS)


@lru_cache(maxsize=1)
def _page_files() -> dict[str, bytes]:
    """The page's files, which are small. Kept in memory, so that no request waits for a disk or a thread."""
    return {path.name: path.read_bytes() for path in PAGE.glob("*") if path.is_file()}
