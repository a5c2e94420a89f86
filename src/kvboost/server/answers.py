"""The bodies of answers, field by field, as OpenAI's clients read them; `kvboost` is our own field.

Data only. What is None and was set is sent as null; what was not set is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel

from kvboost.choices import Origin
from kvboost.models import GenerationResult

FinishReason = Literal["stop", "length"]


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
    spans: list[SpanBody]

    @classmethod
    def of(cls, result: GenerationResult, told: Callable[[str], str]) -> Reuse:
        """Of a result; `told` turns a reason into what the caller may see."""
        return cls(
            ttft_ms=result.ttft_ms,
            total_ms=result.total_ms,
            mode=result.mode,
            cached_tokens=result.cached_tokens,
            recomputed_tokens=result.recomputed_tokens,
            spans=[
                SpanBody(start=span.start, end=span.end, origin=span.origin, reason=told(span.reason))
                for span in result.spans
            ],
        )


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


class ChatCompletion(Answer):
    """An answer in a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
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


class ChatChunk(Answer):
    """A chunk of an answer in a chat."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
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


class TextCompletion(Answer):
    """A completion, or a chunk of one: then `usage` and `kvboost` are in the last chunk only."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
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


class WarmBody(Answer):
    prompt_tokens: int
    cached_tokens: int
    ms: float


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
