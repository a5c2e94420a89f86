"""Hostile tenants: whatever one of them sends, or does not read, the others are served."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import openai
import pytest
from anyio import to_thread
from fastapi import FastAPI

from kvboost import KVBoost
from kvboost.server.app import create_app
from kvboost.server.errors import ApiError
from kvboost.server.readers import parse
from kvboost.server.schemas import ChatRequest
from kvboost.server.settings import ApiKey, ServerSettings
from tests.fixture_types import MakeEngine
from tests.server.running import HELLO, MODEL, Running, Serve, wait_for
from tests.tiny_models import random_ids

KEYS = (ApiKey("eve"), ApiKey("ann"))
LONG: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 900}
SHORT: dict[str, Any] = {"model": MODEL, "prompt": "who are you?", "max_tokens": 2}
INFO = ("/health", "/ready", "/metrics", "/", "/page/page.js", "/v1/cache/stats?chunks=5")


def headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@contextmanager
def raw_request(
    server: Running, body: dict[str, Any], key: str = "eve", receive_bytes: int | None = None
) -> Iterator[socket.socket]:
    """A connection on which a request was sent, whose other end does as it likes."""
    host, port = server.url.removeprefix("http://").split(":")
    raw = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
    head += f"Content-Length: {len(raw)}\r\nContent-Type: application/json\r\n\r\n"
    with socket.socket() as sock:
        if receive_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.settimeout(30)
        sock.connect((host, int(port)))
        sock.sendall(head.encode() + raw)
        yield sock


# --- what is too much ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"messages": HELLO * 5_000}, "too_many_messages"),
        ({"messages": [{"role": "user", "content": "7" * 3_000_000}]}, "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "7" * 20_000}]}, "context_length_exceeded"),
    ],
    ids=["messages", "characters", "tokens"],
)
def test_what_cannot_fit_is_refused_before_it_is_read(
    make_engine: MakeEngine, serve: Serve, monkeypatch: pytest.MonkeyPatch, body: Any, code: str
) -> None:
    engine = make_engine()
    server = serve(engine)
    encoded: list[int] = []
    encoder = engine.core.parts.reader._encoder
    encode = encoder.encode
    monkeypatch.setattr(
        encoder, "encode", lambda text, **options: encoded.append(len(text)) or encode(text, **options)
    )
    assert engine.max_positions is not None
    assert engine.max_positions < 20_000
    for route in ("/v1/chat/completions", "/v1/cache/warm", "/v1/cache/explain", "/v1/cache/pin"):
        fields = {"model": MODEL, **body} if "chat" in route else body
        response = server.client.post(route, json=fields)
        assert (response.status_code, response.json()["error"]["code"]) == (400, code), route
        assert response.json()["error"]["param"] == "messages"
    assert sum(encoded) <= 4 * 2 * 16_384


def test_plain_prompts_have_the_same_limits(make_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_engine(), max_prompt_characters=100, max_messages=2)
    for prompt in ("x" * 101, ["x", "x" * 101]):
        response = server.client.post("/v1/completions", json={**SHORT, "prompt": prompt})
        assert response.status_code == 400
        assert "101 characters are more than the 100" in response.json()["error"]["message"]
    assert server.complete("x" * 100, max_tokens=1)
    assert server.complete(list(range(5, 200)), max_tokens=1), "token ids are no characters"
    response = server.client.post("/v1/chat/completions", json={**LONG, "messages": HELLO * 3})
    assert "3 messages and parts are more than the 2" in response.json()["error"]["message"]


@pytest.mark.timed
@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": ""}] * 140_000,
        [{"role": "user", "content": [{"type": "text", "text": ""}] * 90_000}],
    ],
    ids=["messages", "parts"],
)
def test_looking_at_a_body_takes_no_time(messages: list[Any]) -> None:
    """Validating holds the interpreter: a second of it would be a second for all."""
    raw = json.dumps({"model": MODEL, "messages": messages}).encode()
    assert len(raw) < 5_000_000
    with pytest.raises(ApiError, match="messages and parts are more than the 16384"):
        parse(ChatRequest, raw)
    started = time.perf_counter()
    with pytest.raises(ApiError):
        parse(ChatRequest, raw)
    refused_s = time.perf_counter() - started
    started = time.perf_counter()
    json.loads(raw)
    assert refused_s < 5 * (time.perf_counter() - started)


def test_a_wrong_parameter_of_a_route_is_told_in_our_words(make_engine: MakeEngine, serve: Serve) -> None:
    told = serve(make_engine()).client.get("/v1/cache/stats?chunks=-1").json()["error"]
    assert told["param"] == "chunks"
    assert "input should" not in told["message"].lower()


# --- reading ---------------------------------------------------------------------------------


class SlowReading:
    """A tokenizer that takes its time for texts with a certain word."""

    def __init__(self, engine: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
        self.let = threading.Event()
        self.begun = self.ended = 0
        tokenize = engine.core.tokenize

        def slow(prompt: Any, salt: Any, *, bounds: Any, **options: Any) -> Any:
            if "slowly" in str(prompt):
                self.begun += 1
                try:
                    while not self.let.wait(0.01):
                        bounds.go_on()
                finally:
                    self.ended += 1
            return tokenize(prompt, salt, bounds=bounds, **options)

        monkeypatch.setattr(engine.core, "tokenize", slow)


SLOWLY: dict[str, Any] = {**LONG, "messages": [{"role": "user", "content": "slowly"}], "max_tokens": 1}


def test_clients_that_left_hold_no_reader(
    make_engine: MakeEngine, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four requests whose clients had left held all threads, and nobody else was answered."""
    engine = make_engine()
    reading = SlowReading(engine, monkeypatch)
    server = serve(engine)
    with ExitStack() as clients:
        for _ in range(8):
            clients.enter_context(raw_request(server, SLOWLY))
        wait_for(lambda: reading.begun == 2)
    wait_for(lambda: reading.ended == 2, within_s=5)
    assert server.complete("hello", max_tokens=1)
    assert reading.begun == 2, "what was not begun never is"
    wait_for(lambda: 'status="499"} 8.0' in server.client.get("/metrics").text)


def test_a_tenant_that_reads_slowly_holds_nobody_up(
    make_engine: MakeEngine, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    reading = SlowReading(engine, monkeypatch)
    server = serve(engine, api_keys=KEYS)
    with ExitStack() as clients:
        for _ in range(8):
            clients.enter_context(raw_request(server, SLOWLY))
        wait_for(lambda: reading.begun == 2)
        ann = httpx.Client(base_url=server.url, headers=headers("ann"), timeout=5)
        clients.enter_context(ann)
        assert ann.post("/v1/completions", json=SHORT).status_code == 200
        for route in INFO:
            assert ann.get(route).status_code == 200, route
        reading.let.set()


def test_reading_takes_no_longer_than_it_may(
    make_engine: MakeEngine, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    reading = SlowReading(engine, monkeypatch)
    server = serve(engine, read_timeout_s=0.2)
    for route, body in (("/v1/chat/completions", SLOWLY), ("/v1/cache/warm", {"prompt": "slowly"})):
        response = server.client.post(route, json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (408, "timeout")
    wait_for(lambda: reading.ended == 2)
    assert server.complete("hello", max_tokens=1)


@pytest.mark.timed
@pytest.mark.parametrize(
    "sent",
    [b"", b"POST /v1/comple", b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: ", b"again GET /"],
    ids=["nothing", "method", "header", "again"],
)
def test_headers_that_do_not_come(make_engine: MakeEngine, serve: Serve, sent: bytes) -> None:
    server = serve(make_engine(), read_timeout_s=0.3)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        if sent.startswith(b"again "):  # on a connection that was of use before
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            found = b""
            while not found.endswith(b'{"status":"ok"}'):
                found += sock.recv(1000)
        started = time.monotonic()
        for byte in sent.removeprefix(b"again "):
            sock.sendall(bytes([byte]))
            time.sleep(0.005)
        assert sock.recv(1000) == b"", "it was closed"
        assert time.monotonic() - started < 2


def test_a_request_that_takes_longer_than_headers_may(make_slow_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_slow_engine(0.05), read_timeout_s=0.3)
    assert server.chat(max_tokens=12)["usage"]["completion_tokens"] == 12


# --- the queue -------------------------------------------------------------------------------


def test_one_key_cannot_fill_the_queue(make_slow_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_slow_engine(0.02), max_sequences=1, max_waiting=6, api_keys=KEYS)
    with ExitStack() as clients, httpx.Client(base_url=server.url, timeout=30) as client:
        clients.enter_context(raw_request(server, LONG))
        server.until(lambda stats: stats["running"] == 1)
        for _ in range(3):
            clients.enter_context(raw_request(server, LONG))
        server.until(lambda stats: stats["waiting"] == 3)
        for route, body in (("/v1/chat/completions", LONG), ("/v1/cache/warm", {"prompt": "x"})):
            refused = client.post(route, json=body, headers=headers("eve"))
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
            assert refused.json()["error"]["message"].startswith("3 of your requests wait already")
            assert 1 <= int(refused.headers["retry-after"]) <= 60
        clients.enter_context(raw_request(server, LONG, "ann"))
        server.until(lambda stats: stats["waiting"] == 4)


def test_what_would_be_refused_is_not_even_read(
    make_slow_engine: MakeEngine, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_slow_engine(0.02)
    server = serve(engine, max_sequences=1, max_waiting=2, api_keys=KEYS)
    with raw_request(server, LONG):
        server.until(lambda stats: stats["running"] == 1)
        with raw_request(server, LONG):
            server.until(lambda stats: stats["waiting"] == 1)
            reading = SlowReading(engine, monkeypatch)
            with httpx.Client(base_url=server.url, headers=headers("eve")) as client:
                assert client.post("/v1/chat/completions", json=SLOWLY).status_code == 429
            assert reading.begun == 0


def test_an_only_key_has_the_whole_queue() -> None:
    assert ServerSettings(max_waiting=8, api_keys=KEYS[:1]).share_of_the_queue == 8
    assert ServerSettings(max_waiting=8, api_keys=KEYS).share_of_the_queue == 4
    assert ServerSettings(max_waiting=8, api_keys=KEYS, max_waiting_per_tenant=20).share_of_the_queue == 8
    assert ServerSettings(max_waiting=8).share_of_the_queue == 4
    assert ServerSettings(max_waiting=1).share_of_the_queue == 1


# --- the batch -------------------------------------------------------------------------------


def test_one_key_cannot_fill_the_batch(make_slow_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_slow_engine(0.02), max_sequences=4, api_keys=KEYS)
    with ExitStack() as clients, httpx.Client(base_url=server.url, timeout=10) as client:
        for _ in range(8):
            clients.enter_context(raw_request(server, LONG))
        server.until(lambda stats: (stats["running"], stats["waiting"]) == (3, 5))
        for _ in range(3):
            answer = client.post("/v1/completions", json=SHORT, headers=headers("ann"))
            assert answer.status_code == 200
        assert server.service.worker.stats.waiting == 5


def test_one_key_cannot_fill_the_arena(make_slow_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_slow_engine(0.02), max_sequences=16, batch_tokens=4_096, api_keys=KEYS)
    with ExitStack() as clients, httpx.Client(base_url=server.url, timeout=10) as client:
        for _ in range(8):
            clients.enter_context(raw_request(server, LONG))
        server.until(lambda stats: stats["running"] >= 3 and stats["waiting"] >= 3)
        assert client.post("/v1/completions", json=SHORT, headers=headers("ann")).status_code == 200
        assert server.service.worker.stats.waiting >= 3


def test_a_request_that_needs_everything_is_served_when_there_is_room(
    make_slow_engine: MakeEngine, serve: Serve
) -> None:
    server = serve(make_slow_engine(0.001), max_sequences=4, batch_tokens=1_024, api_keys=KEYS)
    with httpx.Client(base_url=server.url, timeout=60) as client, ThreadPoolExecutor(4) as pool:
        body = {**SHORT, "prompt": list(range(5, 205)) * 4, "max_tokens": 60}
        asked = [
            pool.submit(client.post, "/v1/completions", json=body, headers=headers(key))
            for key in ("eve", "eve", "ann", "ann")
        ]
        assert [each.result().status_code for each in asked] == [200] * 4


def test_small_requests_cannot_pass_a_big_one_for_ever(make_slow_engine: MakeEngine, serve: Serve) -> None:
    """Each is new when its last one has ended: one after the other, they would never leave it room."""
    keys = tuple(ApiKey(name) for name in ("big", "ann", "bob"))
    server = serve(make_slow_engine(0.005), max_sequences=8, batch_tokens=1_024, api_keys=keys, timeout_s=20)
    over = threading.Event()
    answered: list[int] = []

    def go_on(key: str, seed: int) -> None:
        with httpx.Client(base_url=server.url, timeout=60, headers=headers(key)) as client:
            while not over.is_set():
                seed += 1
                body = {**SHORT, "prompt": random_ids(260, seed), "max_tokens": 40}
                answered.append(client.post("/v1/completions", json=body).status_code)

    with ThreadPoolExecutor(4) as pool:
        for number, key in enumerate(("ann", "bob", "ann", "bob")):
            pool.submit(go_on, key, 1_000 * number)
        wait_for(lambda: len(answered) >= 2)
        with httpx.Client(base_url=server.url, timeout=60, headers=headers("big")) as client:
            body = {**SHORT, "prompt": random_ids(700, 7)}
            response = client.post("/v1/completions", json=body)
        over.set()
    assert response.status_code == 200
    assert set(answered) == {200}


def test_a_batch_that_is_full_is_not_asked_all_the_time(
    make_slow_engine: MakeEngine, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether somebody fits is a walk through the tree, under the lock that the event loop needs."""
    server = serve(make_slow_engine(0.005), max_sequences=2, api_keys=KEYS)
    scheduler = server.service.worker.scheduler
    assert scheduler is not None
    asked = 0
    has_room = scheduler.has_room

    def counted(*arguments: Any, **options: Any) -> bool:
        nonlocal asked
        asked += 1
        return has_room(*arguments, **options)

    monkeypatch.setattr(scheduler, "has_room", counted)
    with ExitStack() as clients:
        for key in ("eve", "ann", "eve", "ann"):
            clients.enter_context(raw_request(server, LONG, key))
        server.until(lambda stats: (stats["running"], stats["waiting"]) == (2, 2))
        asked, steps = 0, scheduler.counts.steps
        wait_for(lambda: scheduler.counts.steps >= steps + 40)
        assert asked <= 2 * 40 // 8 + 4


def test_a_full_queue_has_room_for_a_key_that_has_nothing(make_slow_engine: MakeEngine, serve: Serve) -> None:
    keys = tuple(ApiKey(name) for name in ("eve", "mal", "ann"))
    server = serve(make_slow_engine(0.02), max_sequences=1, max_waiting=4, api_keys=keys)
    with ExitStack() as clients:
        clients.enter_context(raw_request(server, LONG))
        server.until(lambda stats: stats["running"] == 1)
        for key in ("eve", "eve", "mal", "mal"):
            clients.enter_context(raw_request(server, LONG, key))
        server.until(lambda stats: stats["waiting"] == 4)
        clients.enter_context(raw_request(server, LONG, "ann"))
        server.until(lambda stats: stats["waiting"] == 5)


def test_a_client_that_left_takes_no_place_while_another_runs_alone(
    make_slow_engine: MakeEngine, serve: Serve
) -> None:
    server = serve(make_slow_engine(0.02), batching=False, max_waiting=2, max_waiting_per_tenant=2)
    with raw_request(server, LONG):
        server.until(lambda stats: stats["running"] == 1)
        with raw_request(server, LONG), raw_request(server, LONG):
            server.until(lambda stats: stats["waiting"] == 2)
        waiting = server.service.worker._queue._tenants["127.0.0.1"]
        wait_for(lambda: all(ticket.is_cancelled for ticket in waiting))
        with raw_request(server, {**LONG, "stream": True}):
            server.until(lambda stats: (stats["waiting"], stats["cancelled"]) == (1, 2))


def test_what_runs_alone_need_not_fit_into_the_batch(make_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_engine(), mode="baseline", batch_tokens=128)
    assert server.complete("who are you? " * 60, max_tokens=1)["usage"]["prompt_tokens"] > 300
    assert server.post("/v1/cache/explain", prompt="who are you? " * 60)["prompt_tokens"] > 300


def test_what_is_only_looked_up_need_not_fit_into_the_batch(make_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_engine(), batch_tokens=128)
    assert server.post("/v1/cache/explain", prompt="who are you? " * 60)["prompt_tokens"] > 300
    assert server.post("/v1/cache/pin", prompt="who are you? " * 60) == {"tokens": 0}
    refused = server.client.post("/v1/completions", json={**SHORT, "prompt": "who are you? " * 60})
    assert refused.json()["error"]["code"] == "context_length_exceeded"


# --- streams ---------------------------------------------------------------------------------


def test_a_whole_answer_that_nobody_reads_is_dropped(make_engine: MakeEngine, serve: Serve) -> None:
    engine = make_engine()
    engine.model.generation_config.eos_token_id = None
    server = serve(engine, timeout_s=4.0, send_bytes=4_096)
    body = {**LONG, "n": 8, "max_tokens": 60, "logprobs": True, "top_logprobs": 20}
    connections = server.server.server_state.connections
    with raw_request(server, body, receive_bytes=4_096):
        wait_for(lambda: server.service.worker.stats.answered == 8)
        assert len(connections) == 1
        wait_for(lambda: not connections, within_s=20)


def test_a_client_that_never_reads_is_dropped(make_engine: MakeEngine, serve: Serve) -> None:
    engine = make_engine()
    engine.model.generation_config.eos_token_id = None
    server = serve(engine, timeout_s=2.0, send_bytes=4_096)
    body = {**LONG, "stream": True, "n": 8, "max_tokens": 900, "logprobs": True, "top_logprobs": 20}
    connections = server.server.server_state.connections
    with raw_request(server, body, receive_bytes=4_096) as sock:
        wait_for(lambda: server.service.worker.stats.running > 0)
        before = len(connections)
        wait_for(lambda: len(connections) < before, within_s=20)
        server.until(lambda stats: stats["running"] == stats["waiting"] == 0)
        read = b""
        while part := sock.recv(1_000_000):
            read += part
        assert b"[DONE]" not in read
    assert server.chat(max_tokens=1)


def test_waiting_streams_are_kept_alive(make_slow_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_slow_engine(0.02), max_sequences=1, keep_alive_s=0.05)
    with raw_request(server, {**LONG, "max_tokens": 30}):
        server.until(lambda stats: stats["running"] == 1)
        response = server.client.post("/v1/chat/completions", json={**LONG, "max_tokens": 3, "stream": True})
    assert response.status_code == 200
    assert response.text.startswith(": waiting\n\n: waiting\n\n")
    assert response.text.endswith("data: [DONE]\n\n")


def test_clients_skip_what_keeps_a_stream_alive(make_slow_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_slow_engine(0.1), keep_alive_s=0.02)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-")
    stream = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=3, stream=True)  # type: ignore[call-overload]
    chunks = list(stream)
    assert len([chunk for chunk in chunks if chunk.choices[0].finish_reason]) == 1


def test_an_error_behind_a_comment_is_an_event(make_slow_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_slow_engine(0.05), max_sequences=1, keep_alive_s=0.05, timeout_s=0.6)
    with raw_request(server, LONG):
        server.until(lambda stats: stats["running"] == 1)
        time.sleep(0.3)
        response = server.client.post("/v1/chat/completions", json={**LONG, "stream": True})
    assert response.status_code == 200
    assert response.text.startswith(": waiting\n\n")
    last = response.text.split("\n\n")[-2]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"


def test_an_error_before_it_has_a_status(make_slow_engine: MakeEngine, serve: Serve) -> None:
    # A step takes so long that the second has no token before its own time is up.
    server = serve(make_slow_engine(0.3), max_sequences=1, timeout_s=0.5)
    with raw_request(server, LONG):
        server.until(lambda stats: stats["running"] == 1)
        response = server.client.post("/v1/chat/completions", json={**LONG, "stream": True})
    assert response.status_code == 408


# --- the host's threads ----------------------------------------------------------------------


def test_the_host_keeps_its_threads(make_engine: MakeEngine) -> None:
    """The application may be part of another, whose threads are its own: all of them may be busy."""
    app = create_app(make_engine(), ServerSettings(model_name=MODEL))
    asyncio.run(_served_without_threads(app))


async def _served_without_threads(app: FastAPI) -> None:
    limiter = to_thread.current_default_thread_limiter()
    before = limiter.total_tokens
    async with app.router.lifespan_context(app):
        assert limiter.total_tokens == before
        limiter.total_tokens = 1
        await limiter.acquire()
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=10) as client:
            for route in INFO:
                response = await asyncio.wait_for(client.get(route), 5)
                assert response.status_code == 200, route
            answer = await asyncio.wait_for(client.post("/v1/completions", json=SHORT), 20)
            assert answer.status_code == 200
        limiter.release()
        limiter.total_tokens = before
