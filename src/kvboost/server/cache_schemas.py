"""The bodies of requests to /v1/cache/..., field by field."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from kvboost.server.schemas import AnyPrompt, Body, Expected, Messages, Reuse, Salt, TokenIds, wrong

MAX_DOCUMENTS = 1_000
CachePrompt = Annotated[str | TokenIds, Expected("text or token ids, and not empty")]
DocumentText = Annotated[str, Field(min_length=1)]
Documents = Annotated[
    list[DocumentText],
    Field(min_length=1, max_length=MAX_DOCUMENTS, fail_fast=True),
    Expected(f"a list of 1 to {MAX_DOCUMENTS} texts, none of them empty"),
]


class CacheRequest(Body):
    """A text for /v1/cache/...: plain, as token ids, or as messages."""

    prompt: CachePrompt | None = None
    messages: Messages | None = None
    cache_salt: Salt | None = None
    key_salt: str | None = Field(None, description="With the admin key: the salt of the key it is done for.")

    @model_validator(mode="after")
    def _check_one(self) -> CacheRequest:
        if (self.prompt is None) == (self.messages is None):
            raise wrong("prompt", "give either prompt or messages")
        return self

    @property
    def text(self) -> AnyPrompt:
        if self.messages is not None:
            return [message.as_prompt() for message in self.messages]
        assert self.prompt is not None
        return self.prompt

    @property
    def prompt_field(self) -> str:
        return "prompt" if self.messages is None else "messages"


class ExplainRequest(CacheRequest, Reuse):
    """A text for /v1/cache/explain, and what might be reused of it."""


class WarmRequest(CacheRequest):
    """A text for /v1/cache/warm, or documents, to be read behind it where it is given."""

    documents: Documents | None = Field(
        None,
        description="Texts that are to be found anywhere in later prompts, read behind prompt or messages.",
    )

    @model_validator(mode="after")
    def _check_one(self) -> WarmRequest:
        if self.prompt is not None and self.messages is not None:
            raise wrong("prompt", "give either prompt or messages")
        if self.prompt is None and self.messages is None and self.documents is None:
            raise wrong("prompt", "give prompt, messages or documents")
        return self

    @property
    def has_text(self) -> bool:
        """Whether there is a prompt, or messages."""
        return self.prompt is not None or self.messages is not None
