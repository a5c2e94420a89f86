"""The bodies of answers, field by field, as OpenAI's clients read them, and how they are filled in.

`kvboost` is our own field. What is None and was set is sent as null; what was not set is left out. Knows
nothing of how an answer comes about.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from pydantic import BaseModel

from kvboost import __version__
from kvboost.choices import Origin
from kvboost.models import GenerationResult
from kvboost.server.tokens import Choice, FinishReason, TokenNames, TokenScore

FINGERPRINT = f"kvboost-{__version__}"


class Answer(BaseModel):
    """A body that is sent."""

    def to_json(self) -> bytes:
        return self.model_dump_json(exclude_unset=True).encode()


# --- counts and reuse ------------------------------------------------------------------------


class PromptDetails(Answer):
    """Of the prompt's tokens, those whose KV came from the cache."""

    cached_tokens: int


class Usage(Answer):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails

    @classmethod
    def of(cls, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> Usage:
        return cls(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptDetails(cached_tokens=cached_tokens),
        )


class SpanBody(Answer):
    """Prompt tokens `[start, end)` of one origin."""

    start: int
    end: int
    origin: Origin
    reason: str


class Reuse(Answer):
    """Where the KV of the prompt came from, and how long it took: our own field."""

    ttft_ms: float
    total_ms: float
    mode: str
    cached_tokens: int
    recomputed_tokens: int
    exact_tokens: int
    approximate_tokens: int
    saved_tokens: int
    decode_tokens_per_sec: float
    spans: list[SpanBody]

    @classmethod
    def of(cls, result: GenerationResult, told: Callable[[str], str]) -> Reuse:
        """Of a result; `told` turns a reason into what the caller may see."""
        return cls(
            **{name: getattr(result, name) for name in cls.model_fields if name != "spans"},
            spans=[
                SpanBody(start=span.start, end=span.end, origin=span.origin, reason=told(span.reason))
                for span in result.spans
            ],
        )


class Completion(Answer):
    """What whole answers and chunks begin with."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


# --- chats -----------------------------------------------------------------------------------


class TopLogprob(Answer):
    """One of the likeliest tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """A generated token."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    content: list[ChatLogprob]
    refusal: None


class ReplyMessage(Answer):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Answer):
    index: int
    message: ReplyMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(Completion):
    """An answer in a chat."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    kvboost: Reuse


class Delta(Answer):
    role: Literal["assistant"] = "assistant"
    content: str = ""


class ChatChunkChoice(Answer):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(Completion):
    """A chunk of an answer in a chat."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    kvboost: Reuse | None = None


# --- plain completions -----------------------------------------------------------------------


class TextLogprobs(Answer):
    """Lists of equal length, an item per token; offsets count characters of the answer."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(Answer):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None


class TextCompletion(Completion):
    """A completion, or a chunk of one: then `usage` and `kvboost` are in the last chunk only."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: Usage | None = None
    kvboost: Reuse | None = None


# --- the rest --------------------------------------------------------------------------------


class ModelBody(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(Answer):
    object: Literal["list"]
    data: list[ModelBody]


class Status(Answer):
    status: Literal["ok", "ready"]


class WorkerBody(Answer):
    """Requests by how they ended, and those that wait and run now."""

    waiting: int
    running: int
    answered: int
    failed: int
    cancelled: int
    refused: int
    timed_out: int


class BatchBody(Answer):
    """The running batch now, and what it has done."""

    sequences: int
    max_sequences: int
    resident_tokens: int
    steps: int
    decoded_tokens: int
    prefilled_tokens: int
    shared_tokens: int
    kv_bytes: int


class RecentRequest(Answer):
    """Numbers of one request; `at` is Unix time."""

    at: float
    ttft_ms: float
    total_ms: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class RequestsBody(Answer):
    """`hit_share` is the share of prompt tokens that came from the cache; `recent` has the newest last."""

    count: int
    hit_share: float
    recent: list[RecentRequest]


class ChunkBody(Answer):
    """A stored chunk; its text only where the server may log prompts."""

    id: str
    tokens: int
    uses: int
    tier: Literal["memory", "disk"]
    age_s: float
    text: str | None = None


class CacheStats(Answer):
    """The server at this moment; `cache` is what `engine.cache_stats()` says."""

    model: str
    mode: str
    uptime_s: float
    worker: WorkerBody
    batch: BatchBody | None
    requests: RequestsBody
    cache: dict[str, Any]
    chunks: list[ChunkBody] | None = None


class WarmedDocument(Answer):
    """A document, and how many chunks hold its text now. `warning` says what is missing."""

    tokens: int
    chunks: int
    warning: str | None


class WarmBody(Answer):
    """Tokens that were read or found, and how many of them were in the cache before."""

    prompt_tokens: int
    cached_tokens: int
    ms: float
    documents: list[WarmedDocument] | None = None


class ExplainedSpanBody(SpanBody):
    donor: str
    text: str


class ExplainBody(Answer):
    """What would be reused of a prompt. Nothing was changed."""

    prompt_tokens: int
    cached_tokens: int
    choice: str
    spans: list[ExplainedSpanBody]


class PinBody(Answer):
    """How many tokens of the text are stored."""

    tokens: int


class ClearBody(Answer):
    """How many chunks are left because they are pinned or in use."""

    chunks: int


# --- filling them in -------------------------------------------------------------------------


class Writer:
    """Formats one answer. `has_logprobs`: with its tokens' scores; `has_usage`: with a chunk of counts."""

    prefix: str
    whole_kind: tuple[type[Completion], str]  # and what its `object` says
    chunk_kind: tuple[type[Completion], str]

    def __init__(self, model: str, names: TokenNames, *, has_logprobs: bool, has_usage: bool) -> None:
        self._names = names
        self._has_logprobs = has_logprobs
        head: dict[str, Any] = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }
        counts: dict[str, Any] = {"usage": None} if has_usage else {}  # null until they come, if they come
        whole, whole_name = self.whole_kind
        chunk, chunk_name = self.chunk_kind
        self._whole: Callable[..., Answer] = partial(whole, **head, object=whole_name)
        self._chunk: Callable[..., Answer] = partial(chunk, **head, object=chunk_name, **counts)

    def whole(
        self, choices: Sequence[Choice], scores: Sequence[Sequence[TokenScore]], usage: Usage, reuse: Reuse
    ) -> Answer:
        """The answer in one piece, with the scores of every choice."""
        bodies = []
        for choice in choices:
            logprobs = self._logprobs(scores[choice.index]) if self._has_logprobs else None
            about = {"index": choice.index, "logprobs": logprobs, "finish_reason": choice.finish_reason}
            bodies.append(self._choice(choice.text, is_whole=True, **about))
        return self._whole(choices=bodies, usage=usage, kvboost=reuse)

    def opening(self, index: int) -> Answer | None:  # noqa: ARG002
        """The first chunk of a choice, where there is one without text."""
        return None

    def piece(self, index: int, text: str, scores: Sequence[TokenScore]) -> Answer:
        """A chunk with text."""
        logprobs = self._logprobs(scores) if scores and self._has_logprobs else None
        choice = self._choice(text, index=index, logprobs=logprobs, finish_reason=None)
        return self._chunk(choices=[choice])

    def closing(self, choice: Choice, reuse: Reuse | None) -> Answer:
        """The last chunk of a choice; of the last choice with its reuse, unless counts follow."""
        last = self._choice(None, index=choice.index, logprobs=None, finish_reason=choice.finish_reason)
        return self._chunk(choices=[last], **({} if reuse is None else {"kvboost": reuse}))

    def counts(self, usage: Usage, reuse: Reuse) -> Answer:
        """The chunk with counts."""
        return self._chunk(choices=[], usage=usage, kvboost=reuse)

    def _choice(self, text: str | None, *, is_whole: bool = False, **about: Any) -> Answer:
        """A choice of a whole answer or of a chunk; the last chunk has no text."""
        raise NotImplementedError

    def _logprobs(self, scores: Sequence[TokenScore]) -> Answer:
        raise NotImplementedError


class ChatWriter(Writer):
    """Chats."""

    prefix = "chatcmpl"
    whole_kind = ChatCompletion, "chat.completion"
    chunk_kind = ChatChunk, "chat.completion.chunk"

    def opening(self, index: int) -> Answer:
        delta = Delta(role="assistant", content="")
        choice = ChatChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None)
        return self._chunk(choices=[choice])

    def _choice(self, text: str | None, *, is_whole: bool = False, **about: Any) -> Answer:
        if is_whole:
            reply = ReplyMessage(role="assistant", content=text or "", refusal=None)
            return ChatChoice(message=reply, **about)
        return ChatChunkChoice(delta=Delta() if text is None else Delta(content=text), **about)

    def _logprobs(self, scores: Sequence[TokenScore]) -> Answer:
        content = [
            ChatLogprob(
                **self._named(score.token, score.logprob),
                top_logprobs=[TopLogprob(**self._named(*each)) for each in score.top],
            )
            for score in scores
        ]
        return ChatLogprobs(content=content, refusal=None)

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._names.bytes_of(token)
        return {"token": self._names.name_of(token), "logprob": logprob, "bytes": list(raw)}


class TextWriter(Writer):
    """Plain completions."""

    prefix = "cmpl"
    whole_kind = chunk_kind = TextCompletion, "text_completion"

    def _choice(self, text: str | None, *, is_whole: bool = False, **about: Any) -> Answer:  # noqa: ARG002
        return TextChoice(text=text or "", **about)

    def _logprobs(self, scores: Sequence[TokenScore]) -> Answer:
        return TextLogprobs(
            tokens=[self._names.name_of(score.token) for score in scores],
            token_logprobs=[score.logprob for score in scores],
            top_logprobs=[
                {  # of the likeliest tokens, and the chosen one
                    self._names.name_of(token): logprob
                    for token, logprob in (*score.top, (score.token, score.logprob))
                }
                for score in scores
            ],
            text_offset=[score.offset for score in scores],
        )
