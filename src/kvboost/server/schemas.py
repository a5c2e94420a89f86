"""The bodies of requests, field by field, and of errors. What is not named here is refused.

Knows what a field may hold; what it means is told elsewhere. `null` is as good as leaving a field out.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

MAX_CHOICES = 128
_MAX_SALT = 512
_SEEDS = 2**63

# OpenAI's fields that this server does not have, and why. As null they are no more than left out.
UNSUPPORTED: dict[str, str] = {
    **dict.fromkeys(("tools", "tool_choice", "parallel_tool_calls", "tool_calls"), "there are no tools here"),
    **dict.fromkeys(("functions", "function_call"), "there are no tools here"),
    **dict.fromkeys(("audio", "modalities", "input_audio"), "text is all it reads and writes"),
    **dict.fromkeys(("store", "metadata"), "no request is kept"),
    **dict.fromkeys(("service_tier", "prediction", "web_search_options", "moderation"), "it has no use here"),
    **dict.fromkeys(("reasoning_effort", "verbosity"), "tell the model in its prompt"),
    **dict.fromkeys(("safety_identifier", "prompt_cache_key"), "use user and cache_salt"),
    "prompt_cache_retention": "see max_cache_bytes and /v1/cache/pin",
    "logit_bias": "use stop, or the penalties",
    "best_of": "use n, and choose",
    "echo": "the client has the prompt",
    "suffix": "the model writes forwards only",
    "name": "write it into the content",
    "refusal": "send the text as content",
    "annotations": "send the text as content",
}


class Body(BaseModel):
    """A JSON object with known fields only, and values as they are: "1" is no number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, data: Any) -> Any:
        """Also leaves out all unknown fields but the first, which is the one that the error names."""
        if not isinstance(data, dict):
            return data
        kept: dict[Any, Any] = {name: data[name] for name in cls.model_fields if name in data}
        for name, value in data.items():
            if name not in kept and (value is not None or name not in UNSUPPORTED):
                kept[name] = value
                break
        return kept


def _wrong(param: str, message: str) -> PydanticCustomError:
    return PydanticCustomError("between_fields", "{message}", {"message": message, "param": param})


# --- parts of requests -----------------------------------------------------------------------


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """A message of a chat. `developer` reads as `system`; parts are joined by line breaks."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1, fail_fast=True)]

    def as_prompt(self) -> dict[str, str]:
        """As chat templates take it."""
        role = "system" if self.role == "developer" else self.role
        if isinstance(self.content, str):
            return {"role": role, "content": self.content}
        return {"role": role, "content": "\n".join(part.text for part in self.content)}


class StreamOptions(Body):
    """With `include_usage` one more chunk comes at the end, with the counts."""

    include_usage: bool | None = None


class TextFormat(Body):
    """Plain text is what there is."""

    type: Literal["text"]


Messages = Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, fail_fast=True)]
ListsOfIds = Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]
StopText = Annotated[str, Field(min_length=1, max_length=1000)]
StopTexts = Annotated[list[StopText], Field(max_length=4, fail_fast=True)]
Salt = Annotated[str, Field(max_length=_MAX_SALT)]
AnyPrompt = str | list[int] | list[dict[str, str]]


class Generation(Body):
    """What chats and plain completions have in common."""

    prompt_field: ClassVar[str]

    model: str
    temperature: float | None = Field(None, ge=0, le=2, description="0 takes the likeliest token. Default 1.")
    top_p: float | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: StopText | StopTexts | None = None
    seed: int | None = Field(None, ge=-_SEEDS, lt=_SEEDS)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    max_tokens: int | None = Field(None, ge=1)
    user: str | None = Field(None, max_length=256, description="A label in the server's log, and no more.")
    cache_salt: Salt | None = Field(None, description="Only requests with the same salt share cached text.")

    @model_validator(mode="after")
    def _check_stream_options(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise _wrong("stream_options", "has a meaning only with stream")
        return self

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens are told beside the chosen one; None = nothing is told."""
        raise NotImplementedError

    @property
    def prompts(self) -> list[AnyPrompt]:
        raise NotImplementedError


class ChatRequest(Generation):
    """POST /v1/chat/completions"""

    prompt_field = "messages"

    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: TextFormat | None = None

    @model_validator(mode="after")
    def _check_between(self) -> ChatRequest:
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            raise _wrong("max_tokens", "is the older name of max_completion_tokens; give one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise _wrong("top_logprobs", "has a meaning only with logprobs")
        return self

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def prompts(self) -> list[AnyPrompt]:
        return [[message.as_prompt() for message in self.messages]]


class CompletionRequest(Generation):
    """POST /v1/completions"""

    prompt_field = "prompt"

    prompt: str | Texts | TokenIds | ListsOfIds
    logprobs: int | None = Field(None, ge=0, le=5)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[AnyPrompt]:
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        return [prompt] if isinstance(prompt[0], int) else list(prompt)


class CacheRequest(Body):
    """A text for /v1/cache/...: plain, as token ids, or as messages."""

    prompt: str | TokenIds | None = None
    messages: Messages | None = None
    cache_salt: Salt | None = None
    key_salt: str | None = Field(None, description="With the admin key: the salt of the key it is done for.")

    @model_validator(mode="after")
    def _check_one(self) -> CacheRequest:
        if (self.prompt is None) == (self.messages is None):
            raise _wrong("prompt", "give either prompt or messages")
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


# --- errors ----------------------------------------------------------------------------------


class ErrorDetails(BaseModel):
    """What is wrong; `param` names the field, `code` is a word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every answer that is not 2xx."""

    error: ErrorDetails
