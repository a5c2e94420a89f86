"""What has an end: the queue, the time of a request, a client's patience, and the loop's own steps."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from kvboost.errors import KVBoostError
from kvboost.server.schemas import ChatRequest
from tests.fixture_types import MakeEngine
from tests.forwards import on_forward
from tests.server.running import HELLO, Running, Serve, events_of, wait_for
from tests.tiny_models import random_ids

LONG: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 900}


@contextmanager
def raw_connection(server: Running, **body: Any) -> Iterator[socket.socket]:
    """A connection on which a request was sent, whose end is in our hands."""
    host, port = server.url.removeprefix("http://").split(":")
    raw = json.dumps({**LONG, **body}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n"
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        sock.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + raw)
        yield sock


# --- clients that go away --------------------------------------------------------------------


@pytest.mark.parametrize("batching", [True, False])
@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"stream": True}, {"stream": True, "n": 3}])
def test_a_client_that_goes_away_frees_its_place(
    make_slow_engine: MakeEngine, serve: Serve, batching: bool, fields: dict[str, Any]
) -> None:
    server = serve(make_slow_engine(0.02), batching=batching)
    choices = fields.get("n", 1)
    with raw_connection(server, **fields) as sock:
        server.until(lambda stats: stats["running"] + stats["waiting"] == choices)
        if fields.get("stream"):
            assert sock.recv(2000).startswith(b"HTTP/1.1 200")
        else:
            server.until(lambda stats: stats["running"] > 0)
            time.sleep(0.05)
    server.until(lambda stats: stats["running"] == stats["waiting"] == 0, within_s=2)
    server.until(lambda stats: stats["cancelled"] == choices, within_s=2)
    stats = server.service.worker.stats
    assert stats.answered == stats.failed == 0
    scheduler = server.service.worker.scheduler
    wait_for(lambda: scheduler is None or not scheduler.sequences, within_s=2)
    assert server.chat(max_tokens=2)["usage"]["completion_tokens"] == 2
    gone = 'kvboost_requests_total{route="/v1/chat/completions",status="499"} 1.0'
    assert gone in server.client.get("/metrics").text


def test_a_client_that_goes_away_while_it_waits(make_slow_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_slow_engine(0.02), max_sequences=1)
    with raw_connection(server, stream=True) as first:
        first.recv(2000)
        with raw_connection(server, stream=True):
            server.until(lambda stats: stats["waiting"] == 1)
        server.until(lambda stats: stats["waiting"] == 0, within_s=2)
        assert server.service.worker.stats.running == 1


def test_a_client_that_goes_away_while_it_sends(make_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_engine())
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        sock.sendall(head + b"Content-Length: 1000\r\n\r\n{")
        time.sleep(0.1)
    wait_for(lambda: 'route="/v1/completions",status="499"' in server.client.get("/metrics").text)
    assert server.complete("a", max_tokens=1)


# --- the queue -------------------------------------------------------------------------------


def test_the_queue_has_an_end(make_slow_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_slow_engine(0.02), max_sequences=1, max_waiting=2, max_waiting_per_tenant=2)
    with raw_connection(server, stream=True) as running:
        running.recv(2000)
        with raw_connection(server), raw_connection(server):
            server.until(lambda stats: stats["waiting"] == 2)
            for body in (LONG, {**LONG, "stream": True}):
                response = server.client.post("/v1/chat/completions", json=body)
                assert response.status_code == 429
                assert response.json()["error"]["code"] == "queue_full"
                assert 1 <= int(response.headers["retry-after"]) <= 60
            assert server.client.post("/v1/cache/warm", json={"prompt": "x"}).status_code == 429
            assert server.service.worker.stats.refused == 3
        server.until(lambda stats: stats["waiting"] == 0, within_s=2)
        with raw_connection(server):  # some choices fit, and not all: none stays
            server.until(lambda stats: stats["waiting"] == 1)
            assert server.client.post("/v1/chat/completions", json={**LONG, "n": 2}).status_code == 429
            server.until(lambda stats: stats["waiting"] == 1)


def test_callers_take_turns(make_slow_engine: MakeEngine, serve: Serve) -> None:
    from kvboost.server.settings import ApiKey

    server = serve(make_slow_engine(0.005), max_sequences=1, api_keys=(ApiKey("many"), ApiKey("one")))
    order: list[str] = []

    def ask(key: str) -> None:
        body = {"model": "tiny", "prompt": random_ids(10, 1), "max_tokens": 10}
        headers = {"Authorization": f"Bearer {key}"}
        assert (
            httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60).status_code
            == 200
        )
        order.append(key)

    with ThreadPoolExecutor(12) as pool:
        for number in range(8):
            pool.submit(ask, "many")
            if not number:
                server.until(lambda stats: stats["running"] == 1)
        server.until(lambda stats: stats["waiting"] >= 4)
        pool.submit(ask, "one")
    assert order.index("one") <= 5


# --- time ------------------------------------------------------------------------------------


@pytest.mark.parametrize("batching", [True, False])
def test_a_request_that_takes_too_long(make_slow_engine: MakeEngine, serve: Serve, batching: bool) -> None:
    server = serve(make_slow_engine(0.05), batching=batching, timeout_s=0.6)
    response = server.client.post("/v1/chat/completions", json=LONG)
    assert (response.status_code, response.json()["error"]["code"]) == (408, "timeout")
    response = server.client.post("/v1/chat/completions", json={**LONG, "stream": True})
    assert response.status_code == 200, "it had begun"
    *chunks, last = events_of(response.text)
    assert len(chunks) > 2
    assert json.loads(last)["error"]["code"] == "timeout"
    server.until(lambda stats: stats["running"] == 0)
    assert server.chat(max_tokens=1)


@pytest.mark.timed
def test_time_in_the_queue_counts(make_slow_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_slow_engine(0.1), max_sequences=1, timeout_s=0.5)
    with raw_connection(server, stream=True) as running:
        running.recv(2000)
        started = time.monotonic()
        response = server.client.post("/v1/chat/completions", json={**LONG, "stream": True})
        assert response.status_code in (200, 408)
        assert "timeout" in response.text
        assert time.monotonic() - started < 5


def test_a_body_that_does_not_come(make_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_engine(), read_timeout_s=0.3)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        sock.sendall(head + b"Content-Length: 1000\r\n\r\n{")
        assert sock.recv(1000).startswith(b"HTTP/1.1 408")


# --- things that break -----------------------------------------------------------------------


@pytest.mark.parametrize("batching", [True, False])
def test_a_model_that_fails(make_engine: MakeEngine, serve: Serve, batching: bool) -> None:
    engine = make_engine()
    server = serve(engine, batching=batching)
    patch = pytest.MonkeyPatch()
    on_forward(patch, engine.model, _failing)
    response = server.client.post("/v1/chat/completions", json=LONG)
    assert response.status_code == 500
    assert response.json()["error"] == {
        "message": "the server failed: ArithmeticError",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }
    assert server.client.post("/v1/chat/completions", json={**LONG, "stream": True}).status_code == 500
    patch.undo()
    assert server.chat(max_tokens=2)


def _failing(*_arguments: Any) -> None:
    raise ArithmeticError("with a secret text in it")


@pytest.mark.parametrize("batching", [True, False])
def test_a_model_that_fails_in_the_middle(
    make_slow_engine: MakeEngine,
    serve: Serve,
    batching: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_slow_engine(0.01)
    server = serve(engine, batching=batching)
    with server.client.stream("POST", "/v1/chat/completions", json={**LONG, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        on_forward(monkeypatch, engine.model, _failing)
        *_, last = [line for line in lines if line]
    told = json.loads(last.removeprefix("data: "))["error"]
    assert (told["code"], "secret" in last) == ("internal_error", False)
    assert "a request failed" in caplog.text
    assert "ArithmeticError" in caplog.text


def test_a_failure_of_the_librarys_own_is_in_the_log(
    make_engine: MakeEngine, serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(make_engine())

    def fail(*_: Any, **__: Any) -> None:
        raise KVBoostError("the index is broken")

    monkeypatch.setattr(server.service.engine.core, "explain", fail)
    assert server.client.post("/v1/cache/explain", json={"prompt": "hi"}).status_code == 500
    assert "the index is broken" in caplog.text


def test_many_unknown_fields_hold_nobody_up(make_engine: MakeEngine, serve: Serve) -> None:
    """Only the first is looked at: the message names one, and a body can have hundreds of thousands."""
    server = serve(make_engine())
    body = {**LONG, "first": 1, **{f"field{number}": 1 for number in range(200_000)}}
    response = server.client.post("/v1/chat/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "first")
    in_a_message = {**LONG, "messages": [{**HELLO[0], "first": 1, "second": 2}]}
    told = server.client.post("/v1/chat/completions", json=in_a_message).json()["error"]
    assert told["param"] == "messages[0].first"
    errors = _errors_of({**LONG, **{f"field{number}": 1 for number in range(1_000)}})
    assert len(errors) == 1


def _errors_of(body: dict[str, Any]) -> list[Any]:
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate(body)
    return list(caught.value.errors())


def test_a_bug_of_the_server_is_a_500(
    make_engine: MakeEngine, serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(make_engine())
    monkeypatch.setattr(server.service, "stats", _failing)
    response = server.client.get("/v1/cache/stats")
    assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
    assert "ArithmeticError" in caplog.text
    assert server.client.get("/health").status_code == 200


# --- the event loop stays live ---------------------------------------------------------------


def test_reading_a_long_prompt_holds_nobody_up(
    make_engine: MakeEngine, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    server = serve(engine)
    reading, go_on = threading.Event(), threading.Event()

    def slow(*_arguments: Any, **_options: Any) -> Any:
        reading.set()
        assert go_on.wait(10)
        raise ZeroDivisionError

    monkeypatch.setattr(engine.core, "tokenize", slow)
    monkeypatch.setattr(engine, "explain", slow)
    with ThreadPoolExecutor(2) as pool:
        for route, body in (("/v1/chat/completions", LONG), ("/v1/cache/explain", {"prompt": "x"})):
            reading.clear()
            pool.submit(server.client.post, route, json=body)
            assert reading.wait(10)
            assert server.client.get("/health", timeout=2).status_code == 200
        go_on.set()


# --- the log ---------------------------------------------------------------------------------


def test_the_log_has_numbers_and_no_text(
    make_engine: MakeEngine, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    server = serve(make_engine())
    secret = [{"role": "user", "content": "my secret wish"}]
    server.chat(secret, max_tokens=3, temperature=0, user="Ann\nB")
    server.chat_chunks(secret, max_tokens=3, temperature=0)
    server.post("/v1/cache/warm", messages=secret)
    server.client.post("/v1/chat/completions", json={"model": "tiny", "messages": secret, "secret": 1})
    server.client.get("/secret/wish")

    def logged() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "kvboost.server.access"]

    wait_for(lambda: len(logged()) == 5)  # a line is written behind its answer
    lines = logged()
    assert lines[0].startswith("POST /v1/chat/completions 200 ")
    assert ", 17 prompt tokens, 0 cached, 3 new, 127.0.0.1, user 'Ann\\nB'" in lines[0]
    assert ", 17 prompt tokens, 16 cached, 3 new" in lines[1]
    assert lines[2].startswith("POST /v1/cache/warm 200 ")
    assert lines[3].startswith("POST /v1/chat/completions 400 ")
    assert lines[4].startswith("GET other 404 ")
    own = [record.getMessage() for record in caplog.records if not record.name.startswith("http")]
    assert "wish" not in "".join(own)


def test_prompts_are_logged_on_demand(
    make_engine: MakeEngine, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    server = serve(make_engine(), log_prompts=True)
    answer = server.complete("my secret wish", max_tokens=3, temperature=0)["choices"][0]["text"]
    server.chunks("/v1/completions", prompt="my secret wish", max_tokens=3, temperature=0)
    assert caplog.text.count("prompt: 'my secret wish'") == 2
    assert caplog.text.count(f"answer 0: {answer!r}") == 2
