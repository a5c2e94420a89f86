"""The bodies of requests, field by field, and the rules for fields. What is not named here is refused.

Knows what a field may hold; what it means is decided elsewhere. `null` means the same as leaving a field out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from kvboost.choices import Selector
from kvboost.server.settings import MAX_MESSAGES

MAX_CHOICES = 128
_MAX_SALT = 512
_SEEDS = 2**63
EXPECTED, UNSUPPORTED, TOO_MANY = "expected", "unsupported", "too_many"
_LISTED = 100  # errors within a field that are kept: a body can have hundreds of thousands


# --- rules, which stand in `Annotated` and change no value -------------------------------------
# Each replaces the validator's errors by one in our own words: `expected` (what the field must be), or
# `unsupported` (why there is no such thing here). How an error is sent is `errors`' business.


@dataclass(frozen=True)
class Expected:
    """A field that `must be` something, as for `a whole number`. A refusal within it is told instead."""

    words: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return self.around(handler(source))

    def around(self, schema: CoreSchema) -> CoreSchema:
        def check(value: Any, inner: core_schema.ValidatorFunctionWrapHandler) -> Any:
            try:
                return inner(value)
            except ValidationError as error:
                if error.error_count() <= _LISTED:
                    for each in error.errors(include_url=False, include_input=False):
                        if each["type"] == UNSUPPORTED:
                            raise _unsupported(each["ctx"]["reason"]) from None
                raise PydanticCustomError(EXPECTED, "must be {expected}", {"expected": self.words}) from None

        return core_schema.no_info_wrap_validator_function(check, schema)


@dataclass(frozen=True)
class Between:
    """A number from `low` to `high`, both included; None = no bound."""

    low: int
    high: int | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        number = "a whole number" if source is int else "a number"
        bounds = f"of at least {self.low}" if self.high is None else f"between {self.low} and {self.high}"
        bounded = handler(Annotated[source, Field(ge=self.low, le=self.high)])
        return Expected(f"{number} {bounds}").around(bounded)


@dataclass(frozen=True)
class Refused:
    """A field of OpenAI's that this server does not have, and what is said of values that ask for it.

    The type beside it names the values that change nothing. With `only`, this is said of these values alone.
    """

    reason: str
    only: tuple[str, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def check(value: Any, inner: core_schema.ValidatorFunctionWrapHandler) -> Any:
            try:
                return inner(value)
            except ValidationError:
                if self.only and value not in self.only:
                    raise
                raise _unsupported(self.reason) from None

        return core_schema.no_info_wrap_validator_function(check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        described = handler(schema)
        return described if self.only else {**described, "description": f"No other value: {self.reason}."}


def _unsupported(reason: str) -> PydanticCustomError:
    return PydanticCustomError(UNSUPPORTED, "{reason}", {"reason": reason})


class Body(BaseModel):
    """A JSON object with known fields only, and without conversions: "1" is not a number."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        json_schema_extra={"additionalProperties": {"type": "null"}},
    )

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, data: Any) -> Any:
        """Also leaves out all unknown fields but the first, which is the one that the error names."""
        known = cls.__pydantic_fields__.keys()
        if not isinstance(data, dict) or (data.keys() <= known and None not in data.values()):
            return data
        kept = {name: value for name, value in data.items() if value is not None and name in known}
        for name, value in data.items():
            if value is not None and name not in known:
                kept[name] = value
                break
        return kept


def wrong(param: str, message: str) -> PydanticCustomError:
    """For rules between fields: the error of the field `param`."""
    return PydanticCustomError("between_fields", "{message}", {"message": message, "param": param})


def _as_bool(value: Any) -> bool:
    """Literals compare by value, and 0 is equal to False."""
    if not isinstance(value, bool):
        raise ValueError
    return value


def _not_too_many(messages: Any, info: ValidationInfo) -> Any:
    """Refuse too many messages and parts before any is validated, which would block the event loop."""
    if not isinstance(messages, list):
        return messages
    contents = [each.get("content") for each in messages if isinstance(each, dict)]
    count = len(contents) + sum(len(each) for each in contents if isinstance(each, list))
    most = (info.context or {}).get("max_messages", MAX_MESSAGES)
    if count > most:
        told = {"count": count, "most": most}
        raise PydanticCustomError(TOO_MANY, "{count} messages and parts are more than {most}", told)
    return messages


# --- parts of requests -----------------------------------------------------------------------


Off = Annotated[Literal[False], BeforeValidator(_as_bool)]
One = Annotated[int, Field(ge=1, le=1)]
EmptyList = Annotated[list[Any], Field(max_length=0)]
EmptyObject = dict[str, None]
NO_TOOLS = Refused("tool calling is not supported")
TEXT_ONLY = Refused("this model reads text only")
NO_SOUND = Refused("answers are text only")
AS_CONTENT = Refused("an answer is its content; send the text as content")
IN_THE_PROMPT = Refused("there is no such setting; tell the model in its prompt")
CACHED_BY_ITSELF = Refused("text is cached without being asked; see cache_salt and /v1/cache/pin")
NO_TOOL_ROLES = Refused(NO_TOOLS.reason, only=("tool", "function"))


class TextPart(Body):
    """A part of a message."""

    type: Annotated[Literal["text"], TEXT_ONLY]
    text: str
    prompt_cache_breakpoint: Annotated[EmptyObject, CACHED_BY_ITSELF] | None = None


class ChatMessage(Body):
    """A message of a chat. `developer` reads as `system`; parts are joined by line breaks.

    What comes behind `name` are fields of OpenAI's own answers, which clients send back as they came.
    """

    role: Annotated[Literal["system", "developer", "user", "assistant"], NO_TOOL_ROLES]
    content: Content
    name: str | None = Field(None, max_length=64, description="For chat templates that read it.")
    tool_calls: Annotated[EmptyList, NO_TOOLS] | None = None
    tool_call_id: Annotated[None, NO_TOOLS] = None
    function_call: Annotated[None, NO_TOOLS] = None
    audio: Annotated[None, TEXT_ONLY] = None
    annotations: Annotated[EmptyList, AS_CONTENT] | None = None
    refusal: Annotated[Literal[""], AS_CONTENT] | None = None
    provider_specific_fields: Annotated[EmptyObject, AS_CONTENT] | None = None  # litellm's

    def as_prompt(self) -> dict[str, str]:
        """As chat templates take it."""
        role = "system" if self.role == "developer" else self.role
        content = self.content
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        return {"role": role, "content": text} | ({"name": self.name} if self.name else {})


class StreamOptions(Body):
    """With `include_usage` one more chunk comes at the end, with the counts."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[Off, Refused("chunks are not padded")] | None = None


class TextFormat(Body):
    """Plain text only."""

    type: Annotated[Literal["text"], Refused("structured output is not supported")]


Parts = Annotated[list[TextPart], Field(min_length=1, fail_fast=True)]
Content = Annotated[str | Parts, Expected('text, or a list of {"type": "text", "text": ...} parts')]
Messages = Annotated[
    list[ChatMessage],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    BeforeValidator(_not_too_many),
]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, fail_fast=True)]
ListsOfIds = Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]
Prompts = Annotated[
    str | Texts | TokenIds | ListsOfIds,
    Expected("text, token ids, or a list of one of them, and not empty"),
]
StopText = Annotated[str, Field(max_length=1000)]
StopTexts = Annotated[list[StopText], Field(max_length=4, fail_fast=True)]
Stops = Annotated[
    StopText | StopTexts, Expected("text of at most 1000 characters, or a list of at most 4 such texts")
]
Salt = Annotated[str, Field(max_length=_MAX_SALT)]
Label = Annotated[str, Field(max_length=256)]
LabelKey = Annotated[str, Field(max_length=64)]
LabelValue = Annotated[str, Field(max_length=512)]
Labels = Annotated[
    dict[LabelKey, LabelValue | None],
    Field(max_length=16),
    Expected("an object of at most 16 texts, with names of at most 64 and texts of at most 512 characters"),
]
Penalty = Annotated[float, Between(-2, 2)]
AnyPrompt = str | list[int] | list[dict[str, str]]
Mode = Literal["prefix_cache", "chunk_kv_reuse"]  # baseline runs alone: others would wait for its answers


class Neutral(Body):
    """OpenAI's fields that this server does not have, and labels that it has no use for.

    Many clients send all their defaults. A value that asks for nothing is as good as none; what is said of
    every other value stands beside it.
    """

    tools: Annotated[EmptyList, NO_TOOLS] | None = None
    tool_choice: Annotated[Literal["none", "auto"], NO_TOOLS] | None = None
    parallel_tool_calls: Annotated[bool, NO_TOOLS] | None = None
    functions: Annotated[EmptyList, NO_TOOLS] | None = None
    function_call: Annotated[Literal["none", "auto"], NO_TOOLS] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1), NO_SOUND] | None = None
    audio: Annotated[None, NO_SOUND] = None
    logit_bias: (
        Annotated[EmptyObject, Refused("token biases are not supported; use stop, or the penalties")] | None
    ) = None
    best_of: (
        Annotated[One, Refused("choosing among answers is not supported; ask for n, and choose")] | None
    ) = None
    echo: Annotated[Off, Refused("the prompt is not sent back")] | None = None
    suffix: Annotated[Literal[""], Refused("text is continued at its end only")] | None = None
    store: Annotated[Off, Refused("requests are not stored")] | None = None
    service_tier: Annotated[Literal["auto", "default"], Refused("there is one tier only")] | None = None
    prompt_cache_retention: Annotated[Literal["in_memory", "in-memory"], CACHED_BY_ITSELF] | None = None
    prompt_cache_options: Annotated[EmptyObject, CACHED_BY_ITSELF] | None = None
    reasoning_effort: Annotated[None, IN_THE_PROMPT] = None
    verbosity: Annotated[None, IN_THE_PROMPT] = None
    prediction: Annotated[None, Refused("predicted output is not supported")] = None
    web_search_options: Annotated[None, Refused("the server does not search")] = None
    moderation: Annotated[None, Refused("the server does not moderate")] = None
    metadata: Labels | None = Field(None, description="Labels of the client's own.")
    prompt_cache_key: Label | None = Field(None, description="There is one cache: see cache_salt to part it.")


class Reuse(Body):
    """What may be reused for one request, and how it is repaired."""

    mode: Mode | None = Field(
        None, description="What may be reused: an exact prefix, or text that has moved as well."
    )
    recompute_ratio: Annotated[float, Between(0, 1)] | None = Field(
        None, description="The share of moved text that is computed again. Only with chunk_kv_reuse."
    )
    selector: Selector | None = Field(None, description="How that share is chosen. Only with chunk_kv_reuse.")


class Generation(Neutral, Reuse):
    """What chats and plain completions have in common."""

    prompt_field: ClassVar[str]

    model: str
    temperature: Annotated[float, Between(0, 2)] | None = Field(
        None, description="0 takes the likeliest token. Default 1."
    )
    top_p: Annotated[float, Between(0, 1)] | None = None
    n: Annotated[int, Between(1, MAX_CHOICES)] | None = None
    stop: Stops | None = None
    seed: Annotated[int, Between(-_SEEDS, _SEEDS - 1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    max_tokens: Annotated[int, Between(1)] | None = None
    user: Label | None = Field(None, description="A label in the server's log, and no more.")
    safety_identifier: Label | None = Field(None, description="The newer name of user.")
    cache_salt: Salt | None = Field(None, description="Only requests with the same salt share cached text.")

    @model_validator(mode="after")
    def _check_common(self) -> Generation:
        if self.includes_usage and not self.stream:
            raise wrong("stream_options", "has a meaning only with stream")
        if self.user is None:
            self.user = self.safety_identifier
        return self

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def stops(self) -> list[str]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in stops if stop]

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def max_tokens_field(self) -> str:
        """The field that says how long the answer may get."""
        return "max_tokens"

    @property
    def max_new_tokens(self) -> int | None:
        length: int | None = getattr(self, self.max_tokens_field)
        return length

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens are sent beside the chosen one; None = no log-probabilities."""
        raise NotImplementedError

    @property
    def prompts(self) -> list[AnyPrompt]:
        raise NotImplementedError


class ChatRequest(Generation):
    """POST /v1/chat/completions"""

    prompt_field = "messages"

    messages: Messages
    max_completion_tokens: Annotated[int, Between(1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Between(0, 20)] | None = None
    response_format: TextFormat | None = None

    @model_validator(mode="after")
    def _check_between(self) -> ChatRequest:
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            raise wrong("max_tokens", "is the older name of max_completion_tokens; give one of them")
        if self.top_logprobs and not self.logprobs:
            raise wrong("top_logprobs", "has a meaning only with logprobs")
        return self

    @property
    def max_tokens_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def prompts(self) -> list[AnyPrompt]:
        return [[message.as_prompt() for message in self.messages]]


class CompletionRequest(Generation):
    """POST /v1/completions"""

    prompt_field = "prompt"

    prompt: Prompts
    logprobs: Annotated[int, Between(0, 5)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[AnyPrompt]:
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        return [prompt] if isinstance(prompt[0], int) else list(prompt)
