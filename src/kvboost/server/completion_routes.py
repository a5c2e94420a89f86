"""POST /v1/chat/completions and /v1/completions: whole answers, and answers in chunks.

Knows HTTP; how an answer comes about is `completions`' business.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request, Response

from kvboost.server.access import Note, note_failure
from kvboost.server.answers import Answer, ChatChunk, ChatCompletion, TextCompletion
from kvboost.server.auth import Caller
from kvboost.server.bodies import described, parse, read_body
from kvboost.server.completions import (
    Answering,
    Draft,
    PlacedScore,
    log_answer,
    log_prompts,
    read_drafts,
)
from kvboost.server.connection import EventStream, unless_gone
from kvboost.server.dependencies import AnyCaller, TheNote, TheService
from kvboost.server.errors import as_api_error
from kvboost.server.schemas import ChatRequest, CompletionRequest, Generation
from kvboost.server.service import Service
from kvboost.server.writers import ChatWriter, TextWriter, Writer

router = APIRouter(prefix="/v1", tags=["completions"])
DONE = b"[DONE]"


def _answers(whole: type[Answer], chunk: type[Answer]) -> dict[int | str, dict[str, Any]]:
    about = f"A {chunk.__name__} as JSON, or an ErrorBody where it breaks off, or [DONE] at the end."
    event = {
        "type": "object",
        "description": "An event of an answer with `stream`.",
        "properties": {"data": {"type": "string", "description": about}},
        "required": ["data"],
    }
    events = {"text/event-stream": {"schema": event}}
    return {200: {"model": whole, "description": "The answer.", "content": events}}


@router.post(
    "/chat/completions",
    summary="Answer a chat",
    responses=_answers(ChatCompletion, ChatChunk),
    openapi_extra=described(ChatRequest),
    response_class=Response,
)
async def chat(request: Request, service: TheService, caller: AnyCaller, note: TheNote) -> Response:
    return await _complete(request, service, caller, note, ChatRequest, ChatWriter)


@router.post(
    "/completions",
    summary="Continue a text",
    responses=_answers(TextCompletion, TextCompletion),
    openapi_extra=described(CompletionRequest),
    response_class=Response,
)
async def complete(request: Request, service: TheService, caller: AnyCaller, note: TheNote) -> Response:
    return await _complete(request, service, caller, note, CompletionRequest, TextWriter)


async def _complete(
    request: Request,
    service: Service,
    caller: Caller,
    note: Note,
    kind: type[Generation],
    writer_kind: type[Writer],
) -> Response:
    service.check_ready()
    settings = service.settings
    raw = await read_body(request, settings.max_request_bytes, settings.timeout_s)
    body, drafts = await to_thread.run_sync(partial(_read, service, caller, kind, raw))
    note.user = body.user
    answering = Answering(service, body, drafts, caller)
    writer = writer_kind(
        settings.model_name,
        service.names,
        has_logprobs=body.num_logprobs is not None,
        has_usage=body.includes_usage,
    )
    if not body.stream:
        answer = await unless_gone(request.receive, _whole(service, answering, writer))
        note.usage = answering.usage
        return Response(answer.to_json(), media_type="application/json")
    events = _events(service, answering, writer, body.includes_usage, note)
    first = await unless_gone(request.receive, _first(events))
    return EventStream(_behind(first, events))


def _read(
    service: Service, caller: Caller, kind: type[Generation], raw: bytes
) -> tuple[Generation, list[Draft]]:
    """Takes time, so a thread does it."""
    body = parse(kind, raw)
    service.check_model(body.model)
    drafts = read_drafts(service, body, service.salt_of(caller, body.cache_salt))
    if service.settings.log_prompts:
        log_prompts(drafts)
    return body, drafts


async def _whole(service: Service, answering: Answering, writer: Writer) -> Answer:
    texts = [""] * len(answering.choices)
    scores: list[list[PlacedScore]] = [[] for _ in answering.choices]
    async for choice, piece in answering.pieces():
        if piece is not None:
            texts[choice.index] += piece.text
            scores[choice.index] += piece.scores
    if service.settings.log_prompts:
        for index, text in enumerate(texts):
            log_answer(index, text)
    return writer.whole(answering, texts, scores)


async def _events(
    service: Service, answering: Answering, writer: Writer, has_usage: bool, note: Note
) -> AsyncGenerator[bytes, None]:
    """The chunks. An error before the first is raised; one after it is the last event."""
    opened: set[int] = set()
    texts = [""] * len(answering.choices)
    through = 0
    try:
        async for choice, piece in answering.pieces():
            if choice.index not in opened:
                opened.add(choice.index)
                if (opening := writer.opening(choice.index)) is not None:
                    yield opening.to_json()
            if piece is not None:
                texts[choice.index] += piece.text
                yield writer.piece(choice.index, piece.text, piece.scores).to_json()
                continue
            through += 1
            is_last = through == len(answering.choices)
            if is_last:
                note.usage = answering.usage
            yield writer.closing(choice, answering.reuse if is_last and not has_usage else None).to_json()
        if has_usage:
            yield writer.counts(answering.usage, answering.reuse).to_json()
        yield DONE
    except Exception as error:
        if not opened:
            raise
        told = as_api_error(error)
        note.error = told.code or type(error).__name__
        note_failure(told, error)
        yield told.body.model_dump_json().encode()
    if service.settings.log_prompts:
        for index, text in enumerate(texts):
            log_answer(index, text)


async def _first(events: AsyncGenerator[bytes, None]) -> bytes:
    try:
        return await anext(events)
    except BaseException:
        await events.aclose()  # which cancels what is not through
        raise


async def _behind(first: bytes, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    try:
        yield first
        async for event in events:
            yield event
    finally:
        await events.aclose()
