"""Formatting answers: chats and plain completions, whole or in chunks.

Knows the fields of answers and nothing of how they come about.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from kvboost.server.answers import (
    Answer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprob,
    ChatLogprobs,
    Delta,
    ReplyMessage,
    Reuse,
    TextChoice,
    TextCompletion,
    TextLogprobs,
    TopLogprob,
    Usage,
)
from kvboost.server.completions import Answering, Choice, PlacedScore
from kvboost.server.service import FINGERPRINT
from kvboost.server.text import TokenNames


class Writer:
    """Formats one answer. `has_logprobs`: with its tokens' scores; `has_usage`: with a chunk of counts."""

    prefix: str

    def __init__(self, model: str, names: TokenNames, *, has_logprobs: bool, has_usage: bool = False) -> None:
        self._names = names
        self._has_logprobs = has_logprobs
        self._has_usage = has_usage
        self._head: dict[str, Any] = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }

    def whole(self, answering: Answering, texts: list[str], scores: list[list[PlacedScore]]) -> Answer:
        """The answer in one piece."""
        raise NotImplementedError

    def opening(self, index: int) -> Answer | None:
        """The first chunk of a choice, where there is one without text."""
        raise NotImplementedError

    def piece(self, index: int, text: str, scores: Sequence[PlacedScore]) -> Answer:
        """A chunk with text."""
        raise NotImplementedError

    def closing(self, choice: Choice, reuse: Reuse | None) -> Answer:
        """The last chunk of a choice; of the last choice with its reuse, unless counts follow."""
        raise NotImplementedError

    def counts(self, usage: Usage, reuse: Reuse) -> Answer:
        """The chunk with counts."""
        raise NotImplementedError

    def _tail(self, reuse: Reuse | None) -> dict[str, Any]:
        """Fields of a chunk: counts are null until they come, if they come."""
        tail: dict[str, Any] = {"usage": None} if self._has_usage else {}
        return tail if reuse is None else {**tail, "kvboost": reuse}


class ChatWriter(Writer):
    """Chats."""

    prefix = "chatcmpl"

    def whole(self, answering: Answering, texts: list[str], scores: list[list[PlacedScore]]) -> Answer:
        choices = [
            ChatChoice(
                index=choice.index,
                message=ReplyMessage(role="assistant", content=texts[choice.index], refusal=None),
                logprobs=self._logprobs(scores[choice.index]),
                finish_reason=choice.finish_reason,
            )
            for choice in answering.choices
        ]
        return ChatCompletion(
            **self._head,
            object="chat.completion",
            choices=choices,
            usage=answering.usage,
            kvboost=answering.reuse,
        )

    def opening(self, index: int) -> Answer | None:
        return self._chunk(index, Delta(role="assistant", content=""))

    def piece(self, index: int, text: str, scores: Sequence[PlacedScore]) -> Answer:
        return self._chunk(index, Delta(content=text), scores)

    def closing(self, choice: Choice, reuse: Reuse | None) -> Answer:
        last = ChatChunkChoice(
            index=choice.index, delta=Delta(), logprobs=None, finish_reason=choice.finish_reason
        )
        return ChatChunk(**self._head, object="chat.completion.chunk", choices=[last], **self._tail(reuse))

    def counts(self, usage: Usage, reuse: Reuse) -> Answer:
        return ChatChunk(**self._head, object="chat.completion.chunk", choices=[], usage=usage, kvboost=reuse)

    def _chunk(self, index: int, delta: Delta, scores: Sequence[PlacedScore] = ()) -> Answer:
        logprobs = self._logprobs(scores) if scores else None
        choice = ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=None)
        return ChatChunk(**self._head, object="chat.completion.chunk", choices=[choice], **self._tail(None))

    def _logprobs(self, scores: Sequence[PlacedScore]) -> ChatLogprobs | None:
        if not self._has_logprobs:
            return None
        content = [
            ChatLogprob(
                **self._named(placed.score.token, placed.score.logprob),
                top_logprobs=[TopLogprob(**self._named(*each)) for each in placed.score.top],
            )
            for placed in scores
        ]
        return ChatLogprobs(content=content, refusal=None)

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._names.bytes_of(token)
        return {"token": self._names.name_of(token), "logprob": logprob, "bytes": list(raw)}


class TextWriter(Writer):
    """Plain completions."""

    prefix = "cmpl"

    def whole(self, answering: Answering, texts: list[str], scores: list[list[PlacedScore]]) -> Answer:
        choices = [
            TextChoice(
                index=choice.index,
                text=texts[choice.index],
                logprobs=self._logprobs(scores[choice.index]),
                finish_reason=choice.finish_reason,
            )
            for choice in answering.choices
        ]
        return TextCompletion(
            **self._head,
            object="text_completion",
            choices=choices,
            usage=answering.usage,
            kvboost=answering.reuse,
        )

    def opening(self, index: int) -> Answer | None:  # noqa: ARG002
        return None

    def piece(self, index: int, text: str, scores: Sequence[PlacedScore]) -> Answer:
        logprobs = self._logprobs(scores) if scores else None
        return self._chunk(TextChoice(index=index, text=text, logprobs=logprobs, finish_reason=None), None)

    def closing(self, choice: Choice, reuse: Reuse | None) -> Answer:
        last = TextChoice(index=choice.index, text="", logprobs=None, finish_reason=choice.finish_reason)
        return self._chunk(last, reuse)

    def counts(self, usage: Usage, reuse: Reuse) -> Answer:
        return TextCompletion(**self._head, object="text_completion", choices=[], usage=usage, kvboost=reuse)

    def _chunk(self, choice: TextChoice, reuse: Reuse | None) -> Answer:
        return TextCompletion(**self._head, object="text_completion", choices=[choice], **self._tail(reuse))

    def _logprobs(self, scores: Sequence[PlacedScore]) -> TextLogprobs | None:
        if not self._has_logprobs:
            return None
        return TextLogprobs(
            tokens=[self._names.name_of(placed.score.token) for placed in scores],
            token_logprobs=[placed.score.logprob for placed in scores],
            top_logprobs=[self._alternatives(placed) for placed in scores],
            text_offset=[placed.offset for placed in scores],
        )

    def _alternatives(self, placed: PlacedScore) -> dict[str, float]:
        """The likeliest tokens, and the chosen one."""
        pairs = [*placed.score.top, (placed.score.token, placed.score.logprob)]
        return {self._names.name_of(token): logprob for token, logprob in pairs}
