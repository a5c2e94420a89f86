"""OpenAI's own client for Python against the built-in model: all routes and options."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from kvboost import KVBoost
from kvboost.server.settings import ApiKey
from tests.server.running import Running, running

pytestmark = [pytest.mark.real_model, pytest.mark.integration]

RULES = "House rules. Lunch is served at noon. The garden closes at dusk. Dogs are welcome. " * 4
SYSTEM: Any = {"role": "system", "content": RULES}
QUESTIONS = ["When is lunch served?", "Are dogs welcome?", "When does the garden close?", "Name a colour."]
MODE = "prefix_cache"


def question(text: str) -> list[Any]:
    return [SYSTEM, {"role": "user", "content": text}]


@pytest.fixture(scope="module")
def server(real_engine: KVBoost) -> Iterator[Running]:
    real_engine.clear()
    with running(real_engine, model_name="builtin", shutdown_timeout_s=30) as server:
        yield server


@pytest.fixture
def client(server: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def fresh() -> dict[str, str]:
    """A part of the cache that nobody has used."""
    return {"cache_salt": str(uuid.uuid4())}


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["builtin"]
    assert client.models.retrieve("builtin").object == "model"


@pytest.mark.exactness
def test_a_chat_is_answered_as_by_the_engine_and_reuses(
    client: OpenAI, real_engine: KVBoost, fresh: dict[str, str]
) -> None:
    messages = question(QUESTIONS[0])
    expected = real_engine.generate(messages, 12, "baseline", do_sample=False)
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "extra_body": fresh}
    first = client.chat.completions.create(model="builtin", messages=messages, **options)
    second = client.chat.completions.create(model="builtin", messages=messages, **options)
    for answer in (first, second):
        assert answer.choices[0].message.content == expected.output_text
        assert answer.choices[0].finish_reason == expected.finish_reason
        assert answer.usage is not None
        assert answer.usage.completion_tokens == expected.generated_tokens
        assert answer.usage.prompt_tokens == expected.prompt_tokens
    assert first.usage is not None
    assert second.usage is not None
    assert first.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details is not None
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == expected.prompt_tokens - 1
    reuse = second.model_extra["kvboost"] if second.model_extra else {}
    assert [span["origin"] for span in reuse["spans"]][-2:] == ["exact", "live"]


def test_a_streamed_chat_joins_to_the_same_text(client: OpenAI, real_engine: KVBoost) -> None:
    messages = question(QUESTIONS[1])
    expected = real_engine.generate(messages, 12, MODE, do_sample=False)
    stream = client.chat.completions.create(
        model="builtin",
        messages=messages,
        temperature=0,
        max_completion_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == expected.output_text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == expected.generated_tokens
    assert chunks[-2].choices[0].finish_reason == expected.finish_reason
    with client.chat.completions.stream(
        model="builtin", messages=messages, temperature=0, max_tokens=12
    ) as helper:
        deltas = [event.delta for event in helper if event.type == "content.delta"]
    assert "".join(deltas) == expected.output_text


def test_the_next_turn_finds_the_answer(client: OpenAI, fresh: dict[str, str]) -> None:
    messages = question("Name a sea animal.")
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "extra_body": fresh}
    answer = client.chat.completions.create(model="builtin", messages=messages, **options)
    messages += [answer.choices[0].message, {"role": "user", "content": "Another one?"}]
    again = client.chat.completions.create(model="builtin", messages=messages, **options)
    assert answer.usage is not None
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    known = answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) >= known - 2


DEFAULTS: dict[str, Any] = {
    "tools": [],
    "tool_choice": "none",
    "parallel_tool_calls": False,
    "logit_bias": {},
    "logprobs": False,
    "metadata": {},
    "modalities": ["text"],
    "n": 1,
    "response_format": {"type": "text"},
    "service_tier": "auto",
    "stop": "",
    "store": False,
    "reasoning_effort": None,
}


def test_defaults_and_answers_go_back_as_they_are(client: OpenAI, server: Running) -> None:
    """With every default sent along, whole, streamed and from the asynchronous client."""
    messages = question("Name a sea animal.")
    options: dict[str, Any] = {"model": "builtin", "temperature": 0, "max_tokens": 8}
    first = client.chat.completions.create(messages=messages, **options, **DEFAULTS).choices[0].message
    messages += [first.model_dump(), {"role": "user", "content": "Another one?", "name": "Ann"}]
    whole = client.chat.completions.create(messages=messages, **options).choices[0].message.content
    defaults = {**DEFAULTS, "stream_options": {"include_usage": True, "include_obfuscation": False}}

    async def ask() -> str:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as other:
            stream = await other.chat.completions.create(
                messages=messages, stream=True, **options, **defaults
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

    stream = client.chat.completions.create(messages=messages, stream=True, **options, **defaults)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == whole
    assert asyncio.run(ask()) == whole
    text = client.completions.create(
        model="builtin", prompt="The capital of France is", best_of=1, echo=False, suffix="", max_tokens=1
    )
    assert text.choices[0].finish_reason == "length"


def test_completions(client: OpenAI, real_engine: KVBoost) -> None:
    prompts: list[Any] = ["The capital of France is", real_engine.tokenize("Once upon a time")]
    for prompt in prompts:
        expected = real_engine.generate(prompt, 8, MODE, do_sample=False).output_text
        whole = client.completions.create(model="builtin", prompt=prompt, temperature=0, max_tokens=8)
        assert whole.choices[0].text == expected
        parts = client.completions.create(
            model="builtin", prompt=prompt, temperature=0, max_tokens=8, stream=True
        )
        assert "".join(part.choices[0].text for part in parts) == expected
    both = client.completions.create(model="builtin", prompt=prompts[:1] * 2, temperature=0, max_tokens=2)
    assert [choice.text for choice in both.choices] == [" Paris."] * 2


@pytest.mark.exactness
def test_sixteen_clients_at_once_get_the_engines_answers(
    server: Running, real_engine: KVBoost, fresh: dict[str, str]
) -> None:
    asked = [question(f"{QUESTIONS[number % 4]} ({number})") for number in range(16)]
    expected = [real_engine.generate(each, 6, MODE, do_sample=False).output_text for each in asked]

    async def ask(client: AsyncOpenAI, number: int) -> str:
        options: dict[str, Any] = {"model": "builtin", "messages": asked[number], "extra_body": fresh}
        if number % 2:
            answer = await client.chat.completions.create(**options, max_tokens=6, temperature=0)
            return str(answer.choices[0].message.content)
        stream = await client.chat.completions.create(**options, max_tokens=6, temperature=0, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def ask_all() -> list[str]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(16)))

    assert asyncio.run(ask_all()) == expected


def test_stop_strings_and_lengths(client: OpenAI) -> None:
    def ask(**options: Any) -> Any:
        answer = client.completions.create(model="builtin", prompt="1, 2, 3, 4, 5,", temperature=0, **options)
        return answer.choices[0]

    whole = ask(max_tokens=12)
    assert whole.finish_reason == "length"
    assert " 7," in whole.text
    cut = ask(max_tokens=12, stop=[" 7,", "never"])
    assert (cut.text, cut.finish_reason) == (whole.text.partition(" 7,")[0], "stop")
    assert ask(max_tokens=12, stop=", 7").text == whole.text.partition(", 7")[0]


def test_choices_and_seeds(client: OpenAI) -> None:
    def ask(**options: Any) -> list[str]:
        answer = client.chat.completions.create(
            model="builtin", messages=question("Tell me a story."), temperature=1.2, max_tokens=6, **options
        )
        return [str(choice.message.content) for choice in answer.choices]

    three = ask(n=3, seed=5)
    assert len(set(three)) == 3
    assert ask(seed=6) == three[1:2]
    assert ask(n=3, seed=5) == three
    assert ask(seed=5, top_p=0.01) == ask(seed=99, top_p=0.01)


def test_penalties(client: OpenAI) -> None:
    def ask(**options: Any) -> str:
        answer = client.completions.create(
            model="builtin", prompt="na na na na na na", temperature=0, max_tokens=10, **options
        )
        return answer.choices[0].text

    assert ask().count("na") > ask(frequency_penalty=2, presence_penalty=2).count("na")


def test_logprobs(client: OpenAI) -> None:
    chat = client.chat.completions.create(
        model="builtin",
        messages=question(QUESTIONS[0]),
        temperature=0,
        max_tokens=8,
        logprobs=True,
        top_logprobs=3,
    )
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == chat.choices[0].message.content
    for entry in logprobs.content:
        assert entry.token == entry.top_logprobs[0].token
        assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob >= entry.top_logprobs[2].logprob
        assert sum(math.exp(each.logprob) for each in entry.top_logprobs) <= 1.001
    text = client.completions.create(
        model="builtin", prompt="The capital of France is", max_tokens=1, logprobs=5
    )
    assert text.choices[0].logprobs is not None
    assert text.choices[0].logprobs.top_logprobs is not None
    assert " Paris" in text.choices[0].logprobs.top_logprobs[0]


def test_logprobs_are_those_that_score_gives(client: OpenAI, real_engine: KVBoost) -> None:
    answer = client.completions.create(
        model="builtin", prompt="The capital of France is", temperature=0, max_tokens=6, logprobs=0
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    score = real_engine.score(["The capital of France is"], [answer.choices[0].text])[0]
    assert logprobs.token_logprobs == pytest.approx(score.token_log_likelihoods, abs=1e-3)


def test_errors_are_the_clients_own(client: OpenAI) -> None:
    messages = question("hi")
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-4o", messages=messages)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="builtin", messages=messages, temperature=5)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError, match="tools: tool calling is not supported"):
        client.chat.completions.create(
            model="builtin", messages=messages, tools=[{"type": "function", "function": {"name": "f"}}]
        )
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="builtin", prompt="word " * 9000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="builtin", input="hi")


def test_keys(real_engine: KVBoost) -> None:
    keys = (ApiKey("ann", "a"), ApiKey("bob", "b"))
    with running(real_engine, model_name="builtin", api_keys=keys, batching=False) as server:

        def ask(key: str) -> Any:
            with OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
                answer = client.chat.completions.create(
                    model="builtin", messages=question("A key?"), temperature=0, max_tokens=2
                )
                assert answer.usage is not None
                assert answer.usage.prompt_tokens_details is not None
                return answer.usage.prompt_tokens_details.cached_tokens

        with pytest.raises(openai.AuthenticationError):
            ask("eve")
        assert [ask(key) > 0 for key in ("ann", "bob", "ann", "bob")] == [False, False, True, True]
