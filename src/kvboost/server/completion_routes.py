"""POST /v1/chat/completions and /v1/completions: whole answers, and answers in chunks.

Knows HTTP; how an answer comes about is `completions`' business.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

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
from kvboost.server.connection import EventStream, event_of, kept_alive, unless_gone
from kvboost.server.dependencies import AnyCaller, TheNote, TheService
from kvboost.server.errors import as_api_error
from kvboost.server.readers import Reading
from kvboost.server.schemas import ChatRequest, CompletionRequest, Generation
from kvboost.server.service import Service
from kvboost.server.writers import ChatWriter, TextWriter, Writer

router = APIRouter(prefix="/v1", tags=["completions"])
DONE = b"[DONE]"
_LAST_WORDS_S = 1.0  # to tell the client that the time is up


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
    service.worker.check_room(caller.name)
    settings = service.settings
    with service.readers.reading(caller.name, settings.read_timeout_s) as reading:
        raw = await read_body(request, settings.max_request_bytes, reading)
        work = reading.run(partial(_read, service, caller, kind, raw, reading))
        body, drafts = await unless_gone(request.receive, work)
        del raw, work
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
    events = kept_alive(_events(service, answering, writer, body.includes_usage, note), settings.keep_alive_s)
    first = await unless_gone(request.receive, _first(events))
    return EventStream(_behind(first, events, note), answering.until + _LAST_WORDS_S)


def _read(
    service: Service, caller: Caller, kind: type[Generation], raw: bytes, reading: Reading
) -> tuple[Generation, list[Draft]]:
    """Read the request; slow, so it runs in a thread."""
    body = parse(kind, raw, service.settings.max_messages)
    service.check_model(body.model)
    drafts = read_drafts(service, body, service.salt_of(caller, body.cache_salt), reading)
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
    """The answer, chunk by chunk."""
    opened: set[int] = set()
    texts = [""] * len(answering.choices)
    through = 0
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
    if service.settings.log_prompts:
        for index, text in enumerate(texts):
            log_answer(index, text)


async def _first(events: AsyncGenerator[bytes, None]) -> bytes:
    """The first event. An error before it has a status of its own."""
    try:
        return await anext(events)
    except BaseException:
        await events.aclose()  # which cancels what is still running
        raise


async def _behind(
    first: bytes, events: AsyncGenerator[bytes, None], note: Note
) -> AsyncGenerator[bytes, None]:
    """All events. An error after the first one is sent as the last event."""
    try:
        yield first
        async for event in events:
            yield event
    except Exception as error:
        told = as_api_error(error)
        note.error = told.code or type(error).__name__
        note_failure(told, error)
        yield event_of(told.body.model_dump_json().encode())
    finally:
        await events.aclose()
