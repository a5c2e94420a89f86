"""What clients send beside what they ask for: values that ask for nothing change nothing, and the rest is
refused in words of our own.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections.abc import Iterator
from typing import Annotated, Any, get_type_hints

import httpx
import pytest
import torch
from fastapi.exceptions import RequestValidationError
from hypothesis import example, given, settings
from hypothesis import strategies as st
from openai.resources.chat.completions import Completions as OpenAIChats
from openai.resources.completions import Completions as OpenAITexts
from openai.types import chat as openai_types
from pydantic import Field, TypeAdapter, ValidationError

from kvboost import KVBoost
from kvboost.server.cache_schemas import CacheRequest, WarmRequest
from kvboost.server.errors import ApiError, of_validation
from kvboost.server.readers import parse
from kvboost.server.schemas import (
    Body,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    Generation,
    StreamOptions,
    TextPart,
)
from tests.fixture_types import MakeEngine
from tests.server.running import HELLO, Running, Serve, running
from tests.threads import one_torch_thread
from tests.tiny_models import tiny_model, tiny_tokenizer

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4}
NAMED = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{{ m['name'] + ': ' if m['name'] else '' }}{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    engine = KVBoost(tiny_model("llama"), tiny_tokenizer(), chunk_size=16, max_chunks=None)
    with one_torch_thread(), engine, running(engine, default_max_tokens=4) as server:
        yield server


def refusal(kind: type[Body], **body: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(kind, json.dumps(body).encode())
    return caught.value


# --- what changes nothing --------------------------------------------------------------------

NOTHING: list[dict[str, Any]] = [
    {"tools": []},
    *({"tool_choice": choice} for choice in ("none", "auto")),
    *({"parallel_tool_calls": value} for value in (False, True)),
    {"functions": []},
    *({"function_call": choice} for choice in ("none", "auto")),
    *({"modalities": value} for value in (["text"], [])),
    *({"logit_bias": value} for value in ({}, {"50": None})),
    {"best_of": 1},
    {"echo": False},
    {"suffix": ""},
    {"store": False},
    *({"service_tier": tier} for tier in ("auto", "default")),
    *({"prompt_cache_retention": value} for value in ("in_memory", "in-memory")),
    {"prompt_cache_options": {}},
    *(
        {"metadata": value}
        for value in ({}, {"a": "b", "c": None}, {f"{i:064}": "v" * 512 for i in range(16)})
    ),
    *({label: "abc"} for label in ("user", "safety_identifier", "prompt_cache_key")),
    *({"stop": value} for value in ("", [], [""], ["", "", "", ""])),
    *({"stream_options": value} for value in ({}, {"include_usage": False}, {"include_obfuscation": False})),
    {"n": 1, "top_p": 1, "frequency_penalty": 0, "presence_penalty": 0},
    {"top_k": None, "colour": None},
]
IN_CHATS: list[dict[str, Any]] = [
    {"logprobs": False},
    {"top_logprobs": 0},
    {"logprobs": False, "top_logprobs": 0},
    {"response_format": {"type": "text"}},
    {"response_format": {"type": "text", "json_schema": None}},
]
IN_ANSWERS: list[dict[str, Any]] = [
    {"annotations": []},
    {"refusal": ""},
    {"tool_calls": []},
    dict.fromkeys(("annotations", "audio", "function_call", "name", "refusal", "tool_call_id", "tool_calls")),
    {"name": "bot"},
    {"name": ""},
    {"reasoning_content": None},
    {"provider_specific_fields": {"refusal": None}},  # litellm sends this back
]


@pytest.mark.parametrize("fields", NOTHING, ids=lambda fields: str(fields)[:40])
def test_a_value_that_asks_for_nothing_changes_nothing(server: Running, fields: dict[str, Any]) -> None:
    assert_same(server.chat(**GREEDY), server.chat(**GREEDY, **fields))
    assert_same(server.complete("hi", **GREEDY), server.complete("hi", **GREEDY, **fields))


@pytest.mark.parametrize("fields", IN_CHATS, ids=str)
def test_and_in_a_chat(server: Running, fields: dict[str, Any]) -> None:
    assert_same(server.chat(**GREEDY), server.chat(**GREEDY, **fields))


@pytest.mark.parametrize("fields", IN_ANSWERS, ids=str)
def test_an_answer_can_be_sent_back_as_it_came(server: Running, fields: dict[str, Any]) -> None:
    plain = {"role": "assistant", "content": "I am."}
    more = {"role": "user", "content": [{"type": "text", "text": "And?"}]}
    parts = {"role": "user", "content": [{"type": "text", "text": "And?", "image_url": None}]}
    assert_same(
        server.chat([*HELLO, plain, more], **GREEDY), server.chat([*HELLO, plain | fields, parts], **GREEDY)
    )


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_every_null_is_left_out(server: Running, kind: type[Generation]) -> None:
    asked = {**GREEDY, "model": "tiny", kind.prompt_field: HELLO if kind is ChatRequest else "hi"}
    nulls = dict.fromkeys(kind.model_fields.keys() - asked.keys())
    route = "/v1/chat/completions" if kind is ChatRequest else "/v1/completions"
    assert_same(server.post(route, **asked), server.post(route, **asked, **nulls))


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["usage"]["prompt_tokens"] == other["usage"]["prompt_tokens"]
    assert one["choices"] == other["choices"]


def test_empty_stop_texts_do_not_stop(server: Running) -> None:
    whole = server.complete("hi", temperature=0, max_tokens=12)["choices"][0]["text"]
    cut = server.complete("hi", temperature=0, max_tokens=12, stop=["", whole[3:5]])["choices"][0]["text"]
    assert cut == whole.partition(whole[3:5])[0]


def test_obfuscation_can_be_off(server: Running) -> None:
    chunks = server.chat_chunks(
        stream_options={"include_usage": True, "include_obfuscation": False}, **GREEDY
    )
    assert chunks[-1]["usage"]["completion_tokens"] == 4
    assert all("obfuscation" not in chunk for chunk in chunks)


def test_the_newer_name_of_user_is_in_the_log(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvboost.server.access"):
        server.chat(**GREEDY, safety_identifier="ann")
        server.chat(**GREEDY, safety_identifier="ann", user="bob")
        server.settle()
    assert [line.rpartition("user ")[2] for line in caplog.messages if "user " in line] == ["'ann'", "'bob'"]


def test_a_name_is_for_the_chat_template(make_engine: MakeEngine, serve: Serve, tokenizer: Any) -> None:
    """And an answer of ours is recognised under any name."""
    tokenizer.chat_template = NAMED
    server = serve(make_engine())
    plain = server.chat(**GREEDY)
    named = server.chat([{**HELLO[0], "name": "Ann"}], **GREEDY)
    assert named["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"] + len("Ann: ")
    answer = {**named["choices"][0]["message"], "name": "bot"}
    turn = [{**HELLO[0], "name": "Ann"}, answer, {"role": "user", "content": "And?", "name": "Bob"}]
    again = server.chat(turn, **GREEDY)["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] >= named["usage"]["prompt_tokens"]


# --- what clients send -----------------------------------------------------------------------

CLIENTS: dict[str, dict[str, Any]] = {  # beside model and messages
    "LangChain, every option at its default": {
        "stream": False,
        "service_tier": "auto",
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "logprobs": False,
        "max_completion_tokens": 4,
        "n": 1,
        "presence_penalty": 0.0,
        "seed": 1,
        "store": False,
        "temperature": 0.0,
        "top_logprobs": 0,
        "top_p": 1.0,
        "stop": [],
        "tools": [],
        "parallel_tool_calls": False,
    },
    "a settings object, sent whole": {
        "max_tokens": 4,
        "temperature": 0.7,
        "top_p": 1,
        "n": 1,
        "stop": [],
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "logit_bias": {},
        "stream": False,
        "user": "user-1234",
        "organization": None,
    },
    "an agent without tools": {
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "metadata": {"trace": "1"},
        "store": False,
        "reasoning_effort": None,
        "response_format": {"type": "text"},
        "prompt_cache_key": "agent",
    },
}


@pytest.mark.parametrize("fields", CLIENTS.values(), ids=CLIENTS)
def test_bodies_of_clients(server: Running, fields: dict[str, Any]) -> None:
    torch.manual_seed(0)  # bodies without a seed: not every draw has text
    assert server.chat(**fields)["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("create", "kind"), [(OpenAIChats.create, ChatRequest), (OpenAITexts.create, CompletionRequest)]
)
def test_every_field_of_openais_client_is_known(create: Any, kind: type[Body]) -> None:
    """None is refused as one that nobody ever heard of."""
    transport = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    assert inspect.signature(create).parameters.keys() - transport <= kind.model_fields.keys()


def test_every_field_of_openais_messages_is_known() -> None:
    for name in ("Assistant", "User", "System", "Developer", "Tool"):
        fields = get_type_hints(getattr(openai_types, f"ChatCompletion{name}MessageParam"))
        assert fields.keys() <= ChatMessage.model_fields.keys()
    part = get_type_hints(openai_types.ChatCompletionContentPartTextParam)
    assert part.keys() <= TextPart.model_fields.keys()
    options = get_type_hints(openai_types.ChatCompletionStreamOptionsParam)
    assert options.keys() <= StreamOptions.model_fields.keys()


@pytest.fixture
def langchain(server: Running) -> Iterator[Any]:
    found = pytest.importorskip("langchain_openai")
    with httpx.Client() as client:
        yield found.ChatOpenAI(
            model="tiny", base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=client
        )


def test_langchain(langchain: Any) -> None:
    answer = langchain.invoke("hi")
    assert answer.usage_metadata["output_tokens"] == 4
    assert langchain.bind_tools([]).invoke([("system", "Be kind."), ("user", "hi"), answer, ("user", "And?")])
    whole = langchain.bind(temperature=0, stop=[]).invoke("hi").content
    pieces = langchain.bind(temperature=0, stream_options={"include_usage": True}).stream("hi")
    assert "".join(piece.content for piece in pieces) == whole

    async def ask() -> list[str]:
        async with httpx.AsyncClient() as client:
            fields = {"model": "tiny", "base_url": langchain.openai_api_base, "api_key": "none"}
            model = type(langchain)(**fields, temperature=0, http_async_client=client)
            pieces = [piece.content async for piece in model.astream("hi")]
            return [(await model.ainvoke("hi")).content, "".join(pieces)]

    assert asyncio.run(ask()) == [whole, whole]


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("function_calling", "tool calling is not supported"),
        ("json_mode", "structured output is not supported"),
        ("json_schema", "structured output is not supported"),
    ],
)
def test_langchain_is_told_what_is_not_here(langchain: Any, method: str, words: str) -> None:
    schema = {"title": "Place", "type": "object", "properties": {"x": {"type": "integer"}}}
    with pytest.raises(Exception, match=words):
        langchain.with_structured_output(schema, method=method).invoke("Answer in JSON.")


# --- what is refused, and how it is said -----------------------------------------------------

TOOL = {"type": "function", "function": {"name": "f"}}
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [TOOL]}, "tools: tool calling is not supported"),
    ({"tool_choice": "required"}, "tool_choice: tool calling is not supported"),
    ({"tool_choice": TOOL}, "tool_choice: tool calling is not supported"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls: tool calling is not supported"),
    ({"functions": [{"name": "f"}]}, "functions: tool calling is not supported"),
    ({"function_call": {"name": "f"}}, "function_call: tool calling is not supported"),
    (
        {"response_format": {"type": "json_object"}},
        "response_format.type: structured output is not supported",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.type: structured output is not supported",
    ),
    ({"modalities": ["text", "audio"]}, "modalities: answers are text only"),
    ({"audio": {"voice": "ash"}}, "audio: answers are text only"),
    ({"logit_bias": {"50": 1}}, "logit_bias: token biases are not supported; use stop, or the penalties"),
    ({"best_of": 2}, "best_of: choosing among answers is not supported; ask for n, and choose"),
    ({"best_of": True}, "best_of: choosing among answers is not supported; ask for n, and choose"),
    ({"echo": True}, "echo: the prompt is not sent back"),
    ({"echo": 0}, "echo: the prompt is not sent back"),
    ({"suffix": "end"}, "suffix: text is continued at its end only"),
    ({"store": True}, "store: requests are not stored"),
    ({"service_tier": "flex"}, "service_tier: there is one tier only"),
    (
        {"reasoning_effort": "high"},
        "reasoning_effort: there is no such setting; tell the model in its prompt",
    ),
    ({"verbosity": "low"}, "verbosity: there is no such setting; tell the model in its prompt"),
    ({"prediction": {"type": "content"}}, "prediction: predicted output is not supported"),
    ({"web_search_options": {}}, "web_search_options: the server does not search"),
    ({"moderation": {}}, "moderation: the server does not moderate"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation: chunks are not padded",
    ),
    *(
        ({field: value}, f"{field}: text is cached without being asked; see cache_salt and /v1/cache/pin")
        for field, value in (
            ("prompt_cache_retention", "24h"),
            ("prompt_cache_options", {"mode": "implicit"}),
        )
    ),
    *(
        ({"messages": [*HELLO, message]}, f"messages[1].{words}")
        for message, words in (
            ({"role": "tool", "tool_call_id": "1", "content": "5"}, "role: tool calling is not supported"),
            ({"role": "function", "name": "f", "content": "5"}, "role: tool calling is not supported"),
            ({"role": "assistant", "tool_calls": [TOOL]}, "tool_calls: tool calling is not supported"),
            (
                {"role": "assistant", "content": "", "function_call": {"name": "f"}},
                "function_call: tool calling is not supported",
            ),
            ({"role": "user", "content": [IMAGE]}, "content: this model reads text only"),
            (
                {"role": "user", "content": [{"type": "text", "text": "Look:"}, IMAGE]},
                "content: this model reads text only",
            ),
            (
                {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
                "content: this model reads text only",
            ),
            (
                {"role": "assistant", "content": "", "audio": {"id": "1"}},
                "audio: this model reads text only",
            ),
            (
                {"role": "assistant", "content": "", "refusal": "No."},
                "refusal: an answer is its content; send the text as content",
            ),
            (
                {"role": "assistant", "content": "", "annotations": [{}]},
                "annotations: an answer is its content; send the text as content",
            ),
            (
                {"role": "assistant", "content": "", "provider_specific_fields": {"refusal": "No."}},
                "provider_specific_fields: an answer is its content; send the text as content",
            ),
        )
    ),
]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 3.5}, "temperature must be a number between 0 and 2, got 3.5"),
    ({"temperature": "hot"}, 'temperature must be a number between 0 and 2, got "hot"'),
    ({"n": 0}, "n must be a whole number between 1 and 128, got 0"),
    ({"n": 1.5}, "n must be a whole number between 1 and 128, got 1.5"),
    ({"max_tokens": -1}, "max_tokens must be a whole number of at least 1, got -1"),
    ({"stream": "yes"}, 'stream must be true or false, got "yes"'),
    ({"model": 3}, "model must be text, got 3"),
    ({"user": "u" * 257}, "user must have at most 256 characters, got 257"),
    ({"messages": []}, "messages must have at least 1 item, got 0"),
    ({"messages": None}, "messages is required"),
    ({"messages": [None]}, "messages[0] must be an object, got null"),
    ({"messages": "a\n\u202e" + "b" * 60}, 'messages must be a list, got "a\\n\\u202e' + "b" * 37 + '"...'),
    (
        {"messages": [{"role": "wizard", "content": "x"}]},
        "messages[0].role must be one of 'system', 'developer', 'user' or 'assistant', got \"wizard\"",
    ),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content is required"),
    (
        {"messages": [{"role": "user", "content": 3}]},
        'messages[0].content must be text, or a list of {"type": "text", "text": ...} parts, got 3',
    ),
    ({"stop": 3}, "stop must be text of at most 1000 characters, or a list of at most 4 such texts, got 3"),
    (
        {"metadata": {"a": 1}},
        "metadata must be an object of at most 16 texts, with names of at most 64 and texts of at most 512 "
        "characters, got an object",
    ),
    ({"stream_options": {"include_usage": True}}, "stream_options: has a meaning only with stream"),
    ({"top_logprobs": 2}, "top_logprobs: has a meaning only with logprobs"),
    ({"tempreature": 1}, "tempreature is not a known field"),
    ({"a\n\u202e": 1}, "a\\u000a\\u202e is not a known field"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_is_not_here_is_said_plainly(fields: dict[str, Any], words: str) -> None:
    error = refusal(ChatRequest, **{"model": "tiny", "messages": HELLO, **fields})
    assert (str(error), error.code) == (words, "unsupported_parameter")
    assert error.param == words.partition(": ")[0]


@pytest.mark.parametrize(("fields", "words"), WRONG, ids=lambda value: str(value)[:50])
def test_what_is_wrong_is_said_with_what_was_expected(fields: dict[str, Any], words: str) -> None:
    assert str(refusal(ChatRequest, **{"model": "tiny", "messages": HELLO, **fields})) == words


@pytest.mark.parametrize("count", [17, 5000])
def test_labels_have_bounds(count: int) -> None:
    for labels in ({str(i): "" for i in range(count)}, {"k" * 65: ""}, {"a": "v" * 513}):
        assert refusal(ChatRequest, model="tiny", messages=HELLO, metadata=labels).param == "metadata"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "the body is not valid JSON at line 1, column 0"),
        (b'{"model":\n tiny}', "the body is not valid JSON at line 2, column 3"),
        (b"[" * 9000, "the body is nested too deeply"),
        (b"[1]", "the body must be a JSON object, got a list"),
        (b"null", "the body must be a JSON object, got null"),
    ],
)
def test_what_is_no_request_at_all(raw: bytes, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse(ChatRequest, raw)
    assert str(caught.value) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("-1", 'chunks must be at least 0, got "-1"'),
        ("1001", 'chunks must be at most 1000, got "1001"'),
        ("many", 'chunks must be a whole number, got "many"'),
    ],
)
def test_parameters_of_a_route(value: str, words: str) -> None:
    """Which FastAPI checks, with the same validator."""
    number = TypeAdapter(Annotated[int, Field(ge=0, le=1000)])
    with pytest.raises(ValidationError) as caught:
        number.validate_python(value)
    errors = [{**error, "loc": ("query", "chunks")} for error in caught.value.errors()]
    told = of_validation(RequestValidationError(errors))
    assert (str(told), told.param) == (words, "chunks")


VALIDATORS_WORDS = (
    *("input should", "extra input", "valid integer", "valid string", "valid number", "valid boolean"),
    *(
        "valid list",
        "valid dictionary",
        "field required",
        "value error",
        "unable to parse",
        "assertion failed",
    ),
    *("permitted", "should have", "pydantic", "is not valid", "instance of", "finite number"),
)
SCALARS = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=60)),
    *(st.just("x" * 2000), st.just(10**4000), st.sampled_from(["none", "text", "auto", "user", "tool"])),
)
NAMES = st.sampled_from(
    [*sorted({*ChatMessage.model_fields, *TextPart.model_fields, *StreamOptions.model_fields}), "x", "\n"]
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(NAMES, inner, max_size=6),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name)
        for kind in (ChatRequest, CompletionRequest, CacheRequest, WarmRequest)
        for name in kind.model_fields
    ],
)
def test_no_message_is_the_validators(kind: type[Body], name: str) -> None:
    good = {"model": "tiny", "messages": HELLO, "prompt": "hi"}
    body = {field: good[field] for field, about in kind.model_fields.items() if about.is_required()}

    @given(value=VALUES)
    @example(value=[{"role": "user", "content": [{"type": "text", "text": 3}]}])
    @example(value=[{"role": "user", "content": "hi", "name": 3}])
    @example(value=[{"role": 3, "content": "hi"}])
    @example(value=float("nan"))
    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    def check(value: Any) -> None:
        try:
            parse(kind, json.dumps({**body, name: value}).encode())
        except ApiError as error:
            said = str(error).lower()
            assert not [words for words in VALIDATORS_WORDS if words in said], said
            assert len(said) < 400
            assert said.isprintable()

    check()
