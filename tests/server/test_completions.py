"""Answers over HTTP on tiny models: equal to the engine's, whole and in chunks, with every option."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvboost import __version__
from kvboost.batching.scheduler import Scheduler
from kvboost.server.answers import ChatChunk, ChatCompletion, TextCompletion
from kvboost.server.tickets import Ticket
from tests.fixture_types import MakeEngine
from tests.server.running import HELLO, Serve, joined
from tests.tiny_models import random_ids

MODES = ("prefix_cache", "chunk_kv_reuse", "baseline")


def text_of(answer: dict[str, Any], index: int = 0) -> str:
    choice = answer["choices"][index]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


# --- what comes back -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batching", [True, False])
def test_greedy_answers_are_the_engines(
    make_engine: MakeEngine, serve: Serve, mode: str, batching: bool
) -> None:
    engine = make_engine()
    expected = engine.generate(HELLO, 20, mode, do_sample=False)
    server = serve(engine, mode=mode, batching=batching)
    answer = server.chat(temperature=0, max_tokens=20)
    assert text_of(answer) == expected.output_text
    assert answer["choices"][0]["finish_reason"] == expected.finish_reason
    assert answer["usage"]["completion_tokens"] == expected.generated_tokens
    assert answer["kvboost"]["mode"] == mode
    assert joined(server.chat_chunks(temperature=0, max_tokens=20)) == expected.output_text


def test_everything_that_an_answer_has(make_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_engine())
    first = server.chat(temperature=0, max_tokens=8)
    ChatCompletion.model_validate(first, strict=False)
    assert first["object"] == "chat.completion"
    assert first["model"] == "tiny"
    assert first["system_fingerprint"] == f"kvboost-{__version__}"
    assert first["choices"][0].keys() == {"index", "message", "logprobs", "finish_reason"}
    assert first["choices"][0]["message"].keys() == {"role", "content", "refusal"}
    second = server.chat(temperature=0, max_tokens=8)
    assert second["id"] != first["id"]
    assert text_of(second) == text_of(first)
    for answer in (first, second):
        usage, reuse = answer["usage"], answer["kvboost"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == reuse["cached_tokens"]
        assert reuse["spans"][0]["start"] == 0
        assert reuse["spans"][-1]["end"] == usage["prompt_tokens"]
        cached = [span["end"] - span["start"] for span in reuse["spans"] if span["origin"] == "exact"]
        assert sum(cached) == reuse["cached_tokens"]
        assert 0 < reuse["ttft_ms"] <= reuse["total_ms"]
    assert first["kvboost"]["cached_tokens"] == 0
    assert first["kvboost"]["spans"][0]["reason"]
    assert second["kvboost"]["cached_tokens"] == second["usage"]["prompt_tokens"] - 1


def test_chunks_of_a_chat(make_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_engine())
    chunks = server.chat_chunks(temperature=0, max_tokens=8)
    for chunk in chunks:
        ChatChunk.model_validate(chunk)
        assert chunk["object"] == "chat.completion.chunk"
        assert chunk["id"] == chunks[0]["id"]
        assert "usage" not in chunk
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")
    assert ["kvboost" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_counts_in_a_chunk_of_their_own(make_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_engine())
    whole = server.chat(temperature=0, max_tokens=8)
    options = {"include_usage": True}
    chunks = server.chat_chunks(temperature=0, max_tokens=8, stream_options=options)
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert ["kvboost" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    without = server.chat_chunks(temperature=0, max_tokens=8, stream_options={"include_usage": False})
    assert "kvboost" in without[-1]


def test_plain_completions(make_engine: MakeEngine, serve: Serve) -> None:
    engine = make_engine()
    server = serve(engine)
    ids = random_ids(30, 5)
    for prompt in ("some text that goes on", ids):
        expected = engine.generate(prompt, 10, "prefix_cache", do_sample=False).output_text
        answer = server.complete(prompt, temperature=0, max_tokens=10)
        TextCompletion.model_validate(answer)
        assert (answer["object"], text_of(answer)) == ("text_completion", expected)
        chunks = server.chunks("/v1/completions", prompt=prompt, temperature=0, max_tokens=10)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
        assert chunks[-1]["choices"][0]["finish_reason"] == answer["choices"][0]["finish_reason"]


def test_several_prompts_in_one_request(make_engine: MakeEngine, serve: Serve) -> None:
    engine = make_engine()
    server = serve(engine)
    prompts = [random_ids(20, seed) for seed in range(3)]
    expected = [engine.generate(prompt, 6, "prefix_cache", do_sample=False).output_text for prompt in prompts]
    answer = server.complete(prompts, temperature=0, max_tokens=6, n=2)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [choice["text"] for choice in answer["choices"]] == [text for text in expected for _ in range(2)]
    assert answer["usage"]["prompt_tokens"] == 60
    assert answer["usage"]["completion_tokens"] >= 6
    texts = ["one text", "and another"]
    assert len(server.complete(texts, max_tokens=1)["choices"]) == 2


def test_messages_with_parts_and_other_names(make_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_engine())
    plain = [
        {"role": "system", "content": "be\nbrief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho"},
        {"role": "user", "content": "again"},
    ]
    parts = [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]
    other = [{"role": "developer", "content": parts}, *plain[1:2]]
    other += [{"role": "assistant", "content": "ho", "refusal": None, "tool_calls": None}, plain[3]]
    first, second = (server.chat(messages, temperature=0, max_tokens=5) for messages in (plain, other))
    assert text_of(first) == text_of(second)
    assert second["kvboost"]["cached_tokens"] == second["usage"]["prompt_tokens"] - 1


def test_sixteen_clients_at_once(make_engine: MakeEngine, serve: Serve) -> None:
    engine = make_engine()
    shared = random_ids(50, 1)
    prompts = [shared + random_ids(3 + number, number + 2) for number in range(16)]
    expected = [engine.generate(prompt, 12, "baseline", do_sample=False).output_text for prompt in prompts]
    server = serve(engine)
    together = threading.Barrier(16)

    def ask(number: int) -> str:
        together.wait()
        if number % 2:
            return text_of(server.complete(prompts[number], temperature=0, max_tokens=12))
        chunks = server.chunks("/v1/completions", prompt=prompts[number], temperature=0, max_tokens=12)
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(16))) == expected
    assert server.stats()["requests"]["count"] == 16


# --- options ---------------------------------------------------------------------------------


def test_an_answer_as_long_as_asked_or_as_allowed(make_slow_engine: MakeEngine, serve: Serve) -> None:
    engine = make_slow_engine(0.0)
    server = serve(engine, default_max_tokens=7)
    assert server.chat(max_tokens=3)["usage"]["completion_tokens"] == 3
    assert server.chat(max_completion_tokens=4)["usage"]["completion_tokens"] == 4
    assert server.chat(max_completion_tokens=4, max_tokens=4)["usage"]["completion_tokens"] == 4
    assert server.chat()["usage"]["completion_tokens"] == 7
    nearly_full = random_ids((engine.max_positions or 0) - 5, 2)
    answer = server.complete(nearly_full)
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["choices"][0]["finish_reason"] == "length"


def test_seeds_and_choices(make_engine: MakeEngine, serve: Serve) -> None:
    engine = make_engine()
    server = serve(engine)
    answer = server.chat(n=3, seed=40, temperature=1.3, max_tokens=10)
    texts = [text_of(answer, index) for index in range(3)]
    assert len(set(texts)) == 3
    for index, text in enumerate(texts):
        assert text_of(server.chat(seed=40 + index, temperature=1.3, max_tokens=10)) == text
        expected = engine.generate(HELLO, 10, "prefix_cache", 1.3, True, seed=40 + index, top_k=0)
        assert expected.output_text == text
    free = {text_of(server.chat(temperature=1.3, max_tokens=10)) for _ in range(3)}
    assert len(free) == 3
    chunks = server.chat_chunks(n=3, seed=40, temperature=1.3, max_tokens=10)
    assert [joined(chunks, index) for index in range(3)] == texts
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks].count(None) == len(chunks) - 3
    assert "kvboost" in chunks[-1]


def test_top_p_zero_takes_the_likeliest(make_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_engine())
    assert text_of(server.chat(top_p=0, max_tokens=9)) == text_of(server.chat(temperature=0, max_tokens=9))


def test_stop_strings_end_an_answer(make_slow_engine: MakeEngine, serve: Serve) -> None:
    engine = make_slow_engine(0.0)
    server = serve(engine)
    whole = server.chat(temperature=0, max_tokens=60)
    text = text_of(whole)
    inside = text[9:12]
    cut = text[: text.index(inside)]
    for stop in (inside, ["nowhere to be found", inside]):
        answer = server.chat(temperature=0, max_tokens=60, stop=stop)
        assert (text_of(answer), answer["choices"][0]["finish_reason"]) == (cut, "stop")
        assert answer["usage"]["completion_tokens"] < whole["usage"]["completion_tokens"]
        chunks = server.chat_chunks(temperature=0, max_tokens=60, stop=stop)
        assert joined(chunks) == cut
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    not_there = server.chat(temperature=0, max_tokens=60, stop=text[-1] + "x")
    assert (text_of(not_there), not_there["choices"][0]["finish_reason"]) == (text, "length")
    server.until(lambda stats: stats["running"] == 0)


def test_a_step_that_fails_behind_a_stop_string(
    make_slow_engine: MakeEngine, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that the client wants was sent: what fails afterwards is nothing to it."""
    engine = make_slow_engine(0.05)  # so that the next step is under way when the stop string is found
    server = serve(engine)
    text = text_of(server.chat(temperature=0, max_tokens=30))
    stop = text[9:12]
    has_ended = threading.Event()
    end = Ticket.end

    def ending(ticket: Ticket) -> None:
        has_ended.set()
        end(ticket)

    def fail(*_: Any) -> None:
        if has_ended.is_set():
            has_ended.clear()
            raise RuntimeError("out of memory")

    monkeypatch.setattr(Ticket, "end", ending)
    step = Scheduler._step_batch

    def failing(scheduler: Scheduler, reading: Any) -> None:
        step(scheduler, reading)
        fail()

    monkeypatch.setattr(Scheduler, "_step_batch", failing)
    for _ in range(2):
        answer = server.chat(temperature=0, max_tokens=30, stop=stop)
        assert (text_of(answer), answer["choices"][0]["finish_reason"]) == (text[: text.index(stop)], "stop")
        assert answer["usage"]["completion_tokens"]


def test_penalties_change_the_answer(make_slow_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_slow_engine(0.0))
    plain = text_of(server.chat(temperature=0, max_tokens=40))
    assert text_of(server.chat(temperature=0, max_tokens=40, frequency_penalty=0)) == plain
    varied = text_of(server.chat(temperature=0, max_tokens=40, presence_penalty=2, frequency_penalty=2))
    assert len(set(varied)) > len(set(plain))


def test_logprobs_of_a_chat(make_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_engine())
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 25, "logprobs": True}
    answer = server.chat(**fields, top_logprobs=2)
    content = answer["choices"][0]["logprobs"]["content"]
    raw = b"".join(bytes(entry["bytes"]) for entry in content)
    assert raw.decode(errors="replace") == text_of(answer)
    for entry in content:
        assert entry["logprob"] <= 0
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["token"] == entry["token"], "greedy takes the likeliest"
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]
    chunks = server.chat_chunks(**fields, top_logprobs=2)
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    again = [entry for logprobs in streamed for entry in logprobs["content"]]
    assert [entry["bytes"] for entry in again] == [entry["bytes"] for entry in content]
    only = server.chat(**fields)["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in only)
    assert server.chat(temperature=0, max_tokens=2)["choices"][0]["logprobs"] is None


def test_logprobs_of_a_completion(make_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_engine())
    for count in (0, 3):
        answer = server.complete("what is it", temperature=0.8, seed=2, max_tokens=12, logprobs=count)
        logprobs, text = answer["choices"][0]["logprobs"], text_of(answer)
        sizes = {len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
        assert len(sizes) == 1
        assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
        assert all(0 <= offset < len(text) for offset in logprobs["text_offset"])
        for token, logprob, top in zip(
            logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
        ):
            assert top[token] == pytest.approx(logprob)
            assert count <= len(top) <= count + 1


def test_logprobs_stop_with_the_text(make_slow_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_slow_engine(0.0))
    text = text_of(server.chat(temperature=0, max_tokens=60))
    answer = server.chat(temperature=0, max_tokens=60, logprobs=True, stop=text[20:23])
    content = answer["choices"][0]["logprobs"]["content"]
    raw = b"".join(bytes(entry["bytes"]) for entry in content)
    assert raw.decode(errors="replace").startswith(text_of(answer))
    assert len(raw.decode(errors="replace")) <= len(text_of(answer)) + 1


def test_fields_that_say_what_is_so_anyway(make_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_engine())
    nulls = dict.fromkeys(("n", "stop", "stream", "user", "seed", "top_p", "tools", "logit_bias", "store"))
    answer = server.chat(temperature=0, max_tokens=4, response_format={"type": "text"}, **nulls)
    assert text_of(answer) == text_of(server.chat(temperature=0, max_tokens=4, stream=False, stop=[]))


def test_the_model_has_the_name_that_it_is_given(make_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_engine(), model_name="org/name", aliases=("./folder",))
    for name in ("org/name", "./folder"):
        answer = server.post("/v1/completions", model=name, prompt="a", max_tokens=1)
        assert answer["model"] == "org/name"
    listed = server.client.get("/v1/models").json()
    assert [each["id"] for each in listed["data"]] == ["org/name"]
    assert server.client.get("/v1/models/org/name").json() == listed["data"][0]
    missing = server.client.get("/v1/models/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_the_generation_config_of_a_model_with_beams(make_engine: MakeEngine, serve: Serve) -> None:
    engine = make_engine()
    expected = engine.generate(HELLO, 8, "prefix_cache", do_sample=False).output_text
    engine.model.generation_config.num_beams = 3
    server = serve(engine)
    assert joined(server.chat_chunks(temperature=0, max_tokens=8)) == expected
