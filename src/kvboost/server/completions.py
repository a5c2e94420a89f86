"""POST /v1/chat/completions and /v1/completions: from a request's body to its answer, whole or in chunks.

A body is read and checked in a thread, its choices are queued for the worker, and their tokens come back as
pieces of text. How tokens become text is `tokens`' business, how an answer is formatted `answers`'.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from kvboost.errors import InvalidRequestError
from kvboost.requests.request import Request as EngineRequest
from kvboost.server.answers import (
    Answer,
    ChatChunk,
    ChatCompletion,
    ChatWriter,
    Reuse,
    TextCompletion,
    TextWriter,
    Usage,
    Writer,
)
from kvboost.server.asgi import EventStream, Note, TheNote, event_of, kept_alive, note_failure, unless_gone
from kvboost.server.auth import AnyCaller, Caller
from kvboost.server.errors import as_api_error, bad_field
from kvboost.server.readers import Reading, described, parse
from kvboost.server.schemas import AnyPrompt, ChatRequest, CompletionRequest, Generation
from kvboost.server.service import Service, TheService, told_reason
from kvboost.server.tickets import RequestTimeoutError, TokenQueue
from kvboost.server.tokens import Choice, LogprobRecorder, Piece, TokenScore, sampling_arguments

router = APIRouter(prefix="/v1", tags=["completions"])
Draft = tuple[EngineRequest, LogprobRecorder | None]  # one choice to generate
DONE = b"[DONE]"
_LAST_WORDS_S = 1.0  # to tell the client that the time is up
_GRACE_S = 1.0  # so that the worker is the first to end a request that is late
_prompts = logging.getLogger("kvboost.server.prompts")  # with `log_prompts` only


# --- the routes ------------------------------------------------------------------------------


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
    body, drafts = await service.read(request, caller, partial(_read, service, caller, kind))
    note.user = body.user
    await unless_gone(request.receive, service.look_ahead([each for each, _ in drafts]))
    answering = Answering(service, body, drafts, caller)
    writer = writer_kind(
        settings.model_name,
        service.names,
        has_logprobs=body.num_logprobs is not None,
        has_usage=body.includes_usage,
    )
    if not body.stream:
        answer = await unless_gone(request.receive, _whole(answering, writer))
        note.usage = answering.usage
        return Response(answer.to_json(), media_type="application/json")
    events = kept_alive(_events(answering, writer, body.includes_usage, note), settings.keep_alive_s)
    first = await unless_gone(request.receive, _first(events))
    return EventStream(_behind(first, events, note), answering.until + _LAST_WORDS_S)


async def _whole(answering: Answering, writer: Writer) -> Answer:
    scores: list[list[TokenScore]] = [[] for _ in answering.choices]
    async for choice, piece in answering.pieces():
        if piece is not None:
            scores[choice.index] += piece.scores
    return writer.whole(answering.choices, scores, answering.usage, answering.reuse)


async def _events(
    answering: Answering, writer: Writer, has_usage: bool, note: Note
) -> AsyncGenerator[bytes, None]:
    """The answer, chunk by chunk."""
    opened: set[int] = set()
    through = 0
    async for choice, piece in answering.pieces():
        if choice.index not in opened:
            opened.add(choice.index)
            if (opening := writer.opening(choice.index)) is not None:
                yield opening.to_json()
        if piece is not None:
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


# --- reading ---------------------------------------------------------------------------------


def _read(
    service: Service, caller: Caller, kind: type[Generation], raw: bytes, reading: Reading
) -> tuple[Generation, list[Draft]]:
    """Check and tokenize all that is asked for. Takes time, so it runs in a thread; changes nothing."""
    body = parse(kind, raw, service.settings.max_messages)
    service.check_model(body.model)
    salt = service.salt_of(caller, body.cache_salt)
    prompts = body.prompts
    wanted, most = len(prompts) * body.choices, service.worker.max_choices
    if wanted > most:
        raise bad_field("n", f"{wanted} answers in one request are more than the {most} that may wait")
    drafts: list[Draft] = []
    try:
        for prompt in prompts:
            drafts += _read_prompt(service, body, prompt, salt, len(drafts), reading)
    except InvalidRequestError as error:
        raise as_api_error(error, body.prompt_field) from error
    if service.settings.log_prompts:
        for request, _ in drafts:
            _prompts.info("prompt: %r", request.prompt.text)
    return body, drafts


def _read_prompt(
    service: Service, body: Generation, prompt: AnyPrompt, salt: str, first: int, reading: Reading
) -> list[Draft]:
    read = service.tokenize(prompt, salt, reading, field=body.prompt_field)
    new_tokens = _new_tokens(service, body, len(read))
    drafts: list[Draft] = []
    for index in range(first, first + body.choices):
        recorder = None if body.num_logprobs is None else LogprobRecorder(body.num_logprobs)
        arguments = sampling_arguments(body, index, len(read), recorder)
        reuse = service.reuse_of(body)
        arguments = replace(arguments, max_new_tokens=new_tokens, cache_salt=salt, **reuse)
        drafts.append((service.engine.core.read(read, arguments), recorder))
    return drafts


def _new_tokens(service: Service, body: Generation, prompt_tokens: int) -> int:
    """How long the answer may get, as asked, or as long as the model and the server allow."""
    positions = service.engine.max_positions
    room = None if positions is None else positions - prompt_tokens
    asked = body.max_new_tokens
    if room is not None and room < (asked or 1):
        has = f"the model has {positions} positions, and the prompt takes {prompt_tokens}"
        if room < 1:
            field, message = body.prompt_field, f"{has}: shorten it"
        else:
            field, message = body.max_tokens_field, f"{has}: ask for at most {room} tokens, got {asked}"
        raise bad_field(field, message, "context_length_exceeded")
    if asked is not None:
        return asked
    default = service.settings.default_max_tokens
    return default if room is None else min(default, room)


# --- answering -------------------------------------------------------------------------------


class Answering:
    """All choices of a request, queued when this is made. Made and used in the event loop."""

    def __init__(self, service: Service, body: Generation, drafts: list[Draft], caller: Caller) -> None:
        self._service = service
        self._caller = caller
        self._per_prompt = body.choices
        self.until = time.monotonic() + service.settings.timeout_s + _GRACE_S
        self._tokens: TokenQueue = asyncio.Queue()
        self.choices: list[Choice] = []
        for index, (request, recorder) in enumerate(drafts):
            try:
                ticket = service.submit(request, caller, param=body.prompt_field, queue=self._tokens)
            except BaseException:
                self.cancel()
                raise
            self.choices.append(Choice(index, ticket, recorder, service.decode, body.stops))

    def cancel(self) -> None:
        """Cancel the choices that are still running."""
        for choice in self.choices:
            choice.ticket.cancel()

    async def pieces(self) -> AsyncGenerator[tuple[Choice, Piece | None], None]:
        """Pieces of all choices as they come, and None where a choice is finished.

        Leaving it early cancels what is not through.
        """
        late = asyncio.get_running_loop().call_later(
            max(0.0, self.until - time.monotonic()), self._tokens.put_nowait, (None, None)
        )
        running = {choice.ticket: choice for choice in self.choices}
        try:
            while running:
                ticket, token = await self._tokens.get()
                if ticket is None:
                    raise RequestTimeoutError("the request took longer than the server allows")
                choice = running[ticket]
                if piece := choice.end() if token is None else choice.take(token):
                    yield choice, piece
                if token is None:
                    del running[ticket]
                    if not running:
                        self._service.count_answer(self.choices[0].result, self.usage)
                    yield choice, None
            if self._service.settings.log_prompts:
                for choice in self.choices:
                    _prompts.info("answer %d: %r", choice.index, choice.text)
        finally:
            late.cancel()
            self.cancel()

    @property
    def usage(self) -> Usage:
        """Counts of all choices; a prompt counts once, however many choices it has."""
        firsts = [choice.result for choice in self.choices[:: self._per_prompt]]
        return Usage.of(
            sum(result.prompt_tokens for result in firsts),
            sum(result.cached_tokens for result in firsts),
            sum(choice.completion_tokens for choice in self.choices),
        )

    @property
    def reuse(self) -> Reuse:
        """Of the first choice."""
        return Reuse.of(self.choices[0].result, partial(told_reason, caller=self._caller))
