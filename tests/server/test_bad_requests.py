"""What is refused, with which status, and in OpenAI's form that names the field."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvboost import KVBoost
from tests.fixture_types import MakeEngine
from tests.server.running import HELLO, MODEL, Running, Serve, running
from tests.threads import one_torch_thread
from tests.tiny_models import tiny_model, tiny_tokenizer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """One server for all of them: what is refused leaves nothing behind."""
    engine = KVBoost(tiny_model("llama"), tiny_tokenizer(), chunk_size=16, max_chunks=None)
    with one_torch_thread(), running(engine, max_request_bytes=20_000, max_waiting=16) as server:
        yield server
        stats = vars(server.service.worker.stats)
        assert {name: count for name, count in stats.items() if count and name != "answered"} == {}
    assert engine.cache_stats()["chunks"] == 0, "nothing was computed"
    engine.close()


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return dict(body["error"])


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": HELLO, **fields}


def text(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "hi", **fields}


BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": HELLO}, "model"),
    ({"model": "tiny"}, "messages"),
    (chat(model=3), "model"),
    (chat(messages=[]), "messages"),
    (chat(messages="hi"), "messages"),
    (chat(messages=[3]), "messages[0]"),
    (chat(messages=[{"content": "hi"}]), "messages[0].role"),
    (chat(messages=[{"role": "user"}]), "messages[0].content"),
    (chat(messages=[{"role": "wizard", "content": "hi"}]), "messages[0].role"),
    (chat(messages=[{"role": "tool", "content": "hi"}]), "messages[0].role"),
    (chat(messages=[{"role": "user", "content": None}]), "messages[0].content"),
    (chat(messages=[{"role": "user", "content": []}]), "messages[0].content"),
    (chat(messages=[*HELLO, {"role": "user", "content": [{"type": "image_url"}]}]), "messages[1].content"),
    (chat(messages=[{"role": "user", "content": "hi", "name": "A" * 65}]), "messages[0].name"),
    (chat(messages=[{"role": "user", "content": "hi", "colour": "red"}]), "messages[0].colour"),
    (chat(temperature=-0.1), "temperature"),
    (chat(temperature=2.1), "temperature"),
    (chat(temperature="1"), "temperature"),
    (chat(temperature=True), "temperature"),
    (chat(top_p=1.5), "top_p"),
    (chat(n=0), "n"),
    (chat(n=129), "n"),
    (chat(n=17), "n"),  # more than may wait here
    (chat(n=1.5), "n"),
    (chat(max_tokens=0), "max_tokens"),
    (chat(max_tokens=1_000_000), "max_tokens"),
    (chat(max_completion_tokens=-1), "max_completion_tokens"),
    (chat(max_tokens=3, max_completion_tokens=4), "max_tokens"),
    (chat(stop=["a"] * 5), "stop"),
    (chat(stop=7), "stop"),
    (chat(stop="x" * 1001), "stop"),
    (chat(seed=2**63), "seed"),
    (chat(seed="lucky"), "seed"),
    (chat(stream="yes"), "stream"),
    (chat(stream_options={"include_usage": True}), "stream_options"),
    (chat(stream=True, stream_options={"include_all": True}), "stream_options.include_all"),
    (chat(logprobs=3), "logprobs"),
    (chat(top_logprobs=3), "top_logprobs"),
    (chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    (chat(frequency_penalty=2.5), "frequency_penalty"),
    (chat(presence_penalty=-3), "presence_penalty"),
    (chat(response_format={"type": "json_object"}), "response_format.type"),
    (chat(response_format={"type": "json_schema", "json_schema": {}}), "response_format.type"),
    (chat(user="u" * 257), "user"),
    (chat(user=7), "user"),
    (chat(cache_salt="s" * 513), "cache_salt"),
    (chat(cache_salt=5), "cache_salt"),
    (chat(prompt="hi"), "prompt"),
    (chat(tempreature=1), "tempreature"),
    (chat(**{"x" * 5000: 1}), "x" * 100),
]
BAD_TEXTS: list[tuple[dict[str, Any], str]] = [
    ({"model": "tiny"}, "prompt"),
    (text(prompt=""), "prompt"),
    (text(prompt=[]), "prompt"),
    (text(prompt=[[]]), "prompt"),
    (text(prompt=["a", 1]), "prompt"),
    (text(prompt=[1, "a"]), "prompt"),
    (text(prompt=[-1]), "prompt"),
    (text(prompt=[5000]), "prompt"),
    (text(prompt=[2**40]), "prompt"),
    (text(prompt={"text": "a"}), "prompt"),
    (text(prompt=[[1, 2], [5000]]), "prompt"),
    (text(prompt=["a", ""]), "prompt"),
    (text(prompt=["a"] * 17), "n"),
    (text(prompt=[7] * 1024), "prompt"),
    (text(prompt=[7] * 2000), "prompt"),
    (text(max_completion_tokens=3), "max_completion_tokens"),
    (text(logprobs=True), "logprobs"),
    (text(logprobs=6), "logprobs"),
    (text(messages=HELLO), "messages"),
    (text(echo=True), "echo"),
    (text(suffix="end"), "suffix"),
    (text(best_of=2), "best_of"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("route", "body", "param"),
    [(CHAT, *bad) for bad in BAD_CHATS] + [(TEXT, *bad) for bad in BAD_TEXTS],
    ids=lambda value: str(value)[-40:],
)
def test_a_bad_field_is_named(
    server: Running, route: str, body: dict[str, Any], param: str, stream: bool
) -> None:
    if stream and "stream" not in body and "stream_options" not in body:
        body = {**body, "stream": True}
    error = error_of(server.client.post(route, json=body), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert param.partition("[")[0].rpartition(".")[2] in error["message"]


@pytest.mark.parametrize(
    ("route", "body", "code"),
    [
        (TEXT, text(prompt=[7] * 2000), "context_length_exceeded"),
        (CHAT, chat(max_tokens=1_000_000), "context_length_exceeded"),
        (CHAT, chat(foo=1), "unknown_parameter"),
        (CHAT, {"model": "tiny"}, "missing_required_parameter"),
        (CHAT, chat(n=0), "invalid_value"),
    ],
)
def test_codes_for_programs(server: Running, route: str, body: dict[str, Any], code: str) -> None:
    assert error_of(server.client.post(route, json=body), 400)["code"] == code


@pytest.mark.parametrize("model", ["gpt-4o", "", "Tiny", "tiny ", "é" * 3000])
def test_another_model_is_not_found(server: Running, model: str) -> None:
    error = error_of(server.client.post(CHAT, json=chat(model=model)), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "'tiny'" in error["message"]


BODIES = {
    "nothing": b"",
    "half": b'{"model": "tiny"',
    "no object": b"[1, 2]",
    "a number": b"3",
    "nan": b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
    "infinity": b'{"model": "tiny", "prompt": "a", "temperature": Infinity}',
    "huge number": b'{"model": "tiny", "prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
    "huge float": b'{"model": "tiny", "prompt": "a", "temperature": 1e999}',
    "not utf-8": b'{"model": "tiny", "prompt": "\xff\xfe"}',
    "half a pair": b'{"model": "tiny", "prompt": "\\ud800"}',
    "deep": b'{"prompt": ' + b"[" * 9000 + b"]" * 9000 + b"}",
    "odd name": b'{"model": "tiny", "prompt": "a", "\\u0000\\n": 1}',
}


@pytest.mark.parametrize("raw", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("route", [CHAT, TEXT, "/v1/cache/warm", "/v1/cache/explain", "/v1/cache/pin"])
def test_bodies_that_are_no_request(server: Running, route: str, raw: bytes) -> None:
    response = server.client.post(route, content=raw, headers={"Content-Type": "application/json"})
    error_of(response, 400)


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data"]
)
def test_only_json_is_read(server: Running, kind: str) -> None:
    """A page from elsewhere could send these without asking."""
    raw = json.dumps(chat()).encode()
    error = error_of(server.client.post(CHAT, content=raw, headers={"Content-Type": kind}), 415)
    assert "application/json" in error["message"]


def test_other_spellings_of_json(server: Running) -> None:
    raw = json.dumps(text(prompt="")).encode()
    for kind in ("Application/JSON", "application/json; charset=utf-8"):
        error_of(server.client.post(TEXT, content=raw, headers={"Content-Type": kind}), 400)


def test_routes_that_are_not_there(server: Running) -> None:
    assert error_of(server.client.get("/v1/embeddings"), 404)["code"] == "not_found"
    assert error_of(server.client.post("/v1/files", json={}), 404)["code"] == "not_found"
    error_of(server.client.get("/docs"), 404)
    error_of(server.client.get("/page/../app.py"), 404)
    error_of(server.client.get("/page/%2e%2e/app.py"), 404)
    error_of(server.client.get("/health/"), 404)
    for odd in ("%00", "a" * 5000, "%ff", "..%2fapp.py", "/etc/passwd", ""):
        error_of(server.client.get(f"/page/{odd}"), 404)
        error_of(server.client.get(f"/v1/models/{odd}"), 404)


def test_methods_that_are_not_there(server: Running) -> None:
    for method, route in (
        ("GET", CHAT),
        ("PUT", CHAT),
        ("POST", "/v1/models"),
        ("DELETE", "/v1/models/tiny"),
    ):
        response = server.client.request(method, route)
        assert error_of(response, 405)["code"] == "method_not_allowed"
        assert response.headers["allow"]


@pytest.mark.parametrize("query", ["chunks=-1", "chunks=many", "chunks=1001"])
def test_bad_parameters(server: Running, query: str) -> None:
    assert error_of(server.client.get(f"/v1/cache/stats?{query}"), 400)["param"] == "chunks"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": HELLO}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"messages": []}, "messages"),
        ({"prompt": "a", "model": "tiny"}, "model"),
        ({"prompt": "a", "cache_salt": 3}, "cache_salt"),
        ({"prompt": [9999]}, "prompt"),
    ],
)
def test_bad_prompts_for_the_cache(server: Running, body: dict[str, Any], param: str) -> None:
    for route in ("warm", "explain", "pin", "unpin"):
        assert error_of(server.client.post(f"/v1/cache/{route}", json=body), 400)["param"] == param


def test_a_prompt_that_is_too_long_to_warm(server: Running) -> None:
    error_of(server.client.post("/v1/cache/warm", json={"prompt": [7] * 2000}), 400)


def test_a_prompt_that_the_batch_has_no_room_for(make_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_engine(), batch_tokens=100)
    for body in ({"prompt": [7] * 200}, {"messages": [{"role": "user", "content": "word " * 200}]}):
        (field,) = body
        for route, more in (
            ("/v1/cache/warm", {}),
            ("/v1/completions" if field == "prompt" else "/v1/chat/completions", {"model": MODEL}),
        ):
            told = error_of(server.client.post(route, json={**body, **more}), 400)
            assert (told["param"], told["code"]) == (field, "context_length_exceeded"), route


def test_a_field_of_the_other_route_is_unknown(server: Running) -> None:
    body = {"model": MODEL, "messages": HELLO, "prompt": "a text"}
    told = error_of(server.client.post("/v1/chat/completions", json=body), 400)
    assert (told["param"], told["code"]) == ("prompt", "unknown_parameter")


# --- size ------------------------------------------------------------------------------------


def test_too_many_bytes_are_not_read(server: Running) -> None:
    raw = json.dumps(text(prompt="a" * 20_000)).encode()
    headers = {"Content-Type": "application/json"}
    for route in (TEXT, "/v1/cache/warm"):
        assert (
            error_of(server.client.post(route, content=raw, headers=headers), 413)["code"]
            == "request_too_large"
        )


def test_too_many_bytes_in_pieces_without_a_length(server: Running) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(3):  # and no end
            sock.sendall(b"2328\r\n" + b" " * 0x2328 + b"\r\n")
        answer = b""
        while b"}}" not in answer:
            answer += sock.recv(4000)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"request_too_large" in answer


def test_it_still_answers(server: Running) -> None:
    assert server.client.get("/ready").status_code == 200
