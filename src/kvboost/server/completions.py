"""From a request's body to its answer: what is read, queued, and how tokens become pieces of text.

Both routes go this way; how pieces are formatted is `writers`' business. Knows the worker and the text
layer, no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from functools import partial

from kvboost.errors import InvalidRequestError, KVBoostError
from kvboost.models import GenerationResult
from kvboost.requests.request import Request
from kvboost.server.answers import FinishReason, Reuse, Usage
from kvboost.server.auth import Caller
from kvboost.server.errors import ApiError, as_api_error
from kvboost.server.readers import Reading
from kvboost.server.sampling import LogprobRecorder, TokenScore, sampling_arguments
from kvboost.server.schemas import AnyPrompt, Generation
from kvboost.server.service import Service, told_reason
from kvboost.server.text import Detokenizer, StopFinder
from kvboost.server.ticket import RequestTimeoutError, Ticket, TokenQueue

_GRACE_S = 1.0  # so that the worker is the first to end a request that is late
_prompts = logging.getLogger("kvboost.server.prompts")


# --- reading ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draft:
    """One choice to generate."""

    request: Request
    recorder: LogprobRecorder | None


def read_drafts(service: Service, body: Generation, salt: str, reading: Reading) -> list[Draft]:
    """Check and tokenize all that `body` asks for, prompt by prompt. Takes time, and changes nothing."""
    prompts = body.prompts
    wanted, most = len(prompts) * body.choices, service.worker.max_choices
    if wanted > most:
        raise ApiError(
            400,
            f"n: {wanted} answers in one request are more than the {most} that may wait",
            param="n",
            code="invalid_value",
        )
    drafts: list[Draft] = []
    try:
        for prompt in prompts:
            drafts += _read_prompt(service, body, prompt, salt, len(drafts), reading)
    except InvalidRequestError as error:
        raise as_api_error(error, body.prompt_field) from error
    return drafts


def _read_prompt(
    service: Service, body: Generation, prompt: AnyPrompt, salt: str, first: int, reading: Reading
) -> list[Draft]:
    engine = service.engine
    read = service.tokenize(prompt, salt, reading, field=body.prompt_field)
    new_tokens = _new_tokens(service, body, len(read))
    drafts = []
    for index in range(first, first + body.choices):
        recorder = None if body.num_logprobs is None else LogprobRecorder(body.num_logprobs)
        arguments = sampling_arguments(body, index, len(read), recorder)
        reuse = service.reuse_of(body)
        arguments = replace(arguments, max_new_tokens=new_tokens, cache_salt=salt, **reuse)
        request = engine.core.read(read, arguments)
        drafts.append(Draft(request, recorder))
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
        raise ApiError(400, f"{field}: {message}", param=field, code="context_length_exceeded")
    if asked is not None:
        return asked
    default = service.settings.default_max_tokens
    return default if room is None else min(default, room)


# --- answering -------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlacedScore:
    """A token's score, and where its text begins in the answer, in characters."""

    score: TokenScore
    offset: int


@dataclass(frozen=True)
class Piece:
    """Text to send, and the scores of the tokens that begin in it."""

    text: str
    scores: list[PlacedScore] = field(default_factory=list)


class Choice:
    """One answer as it grows."""

    def __init__(self, service: Service, index: int, draft: Draft, ticket: Ticket, stops: list[str]) -> None:
        self.index = index
        self.ticket = ticket
        self.completion_tokens = 0
        self._recorder = draft.recorder
        self._detokenizer = Detokenizer(service.decode)
        self._stops = StopFinder(stops)
        self._scores: deque[PlacedScore] = deque()  # of tokens whose text was not sent
        self._decoded = 0  # characters
        self._sent = 0  # characters

    def take(self, token: int) -> Piece | None:
        """The text that is certain with the next token; none behind a stop string, where it ends."""
        if self._stops.found:
            return None  # was generated before the cancellation
        self.completion_tokens += 1
        if self._recorder is not None:
            self._scores.append(PlacedScore(self._recorder.take(token), self._decoded))
        piece = self._piece(self._stops.add(self._decoded_text(self._detokenizer.add(token))))
        if self._stops.found:
            self.ticket.end()
        return piece

    def end(self) -> Piece | None:
        """What is left of the text, after the last token."""
        if self.ticket.error is not None:
            raise self.ticket.error
        if self._stops.found:
            return None
        if self.result.finish_reason == "cancelled":
            raise KVBoostError("the request was cancelled")
        rest = self._decoded_text(self._detokenizer.end())
        return self._piece(self._stops.add(rest) + self._stops.end())

    @property
    def result(self) -> GenerationResult:
        return self.ticket.result

    @property
    def finish_reason(self) -> FinishReason:
        return "stop" if self._stops.found or self.result.finish_reason == "stop" else "length"

    def _decoded_text(self, text: str) -> str:
        self._decoded += len(text)
        return text

    def _piece(self, text: str) -> Piece | None:
        if not text:
            return None
        self._sent += len(text)
        scores = []
        while self._scores and self._scores[0].offset < self._sent:
            scores.append(self._scores.popleft())
        return Piece(text, scores)


class Answering:
    """All choices of a request, queued when this is made. Made and used in the event loop."""

    def __init__(self, service: Service, body: Generation, drafts: list[Draft], caller: Caller) -> None:
        self._service = service
        self._caller = caller
        self._per_prompt = body.choices
        self.until = time.monotonic() + service.settings.timeout_s + _GRACE_S
        self._tokens: TokenQueue = asyncio.Queue()
        self.choices: list[Choice] = []
        for index, draft in enumerate(drafts):
            try:
                ticket = service.submit(draft.request, caller, param=body.prompt_field, queue=self._tokens)
            except BaseException:
                self.cancel()
                raise
            self.choices.append(Choice(service, index, draft, ticket, body.stops))

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
                        self._count()
                    yield choice, None
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

    def _count(self) -> None:
        usage = self.usage
        self._service.count_answer(
            self.choices[0].result,
            usage.prompt_tokens,
            usage.prompt_tokens_details.cached_tokens,
            usage.completion_tokens,
        )


def log_prompts(drafts: list[Draft]) -> None:
    """Log the prompts, with `log_prompts` only."""
    for draft in drafts:
        _prompts.info("prompt: %r", draft.request.prompt.text)


def log_answer(choice: int, text: str) -> None:
    """Log an answer, with `log_prompts` only."""
    _prompts.info("answer %d: %r", choice, text)
