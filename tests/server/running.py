"""A server that runs while a test does, and what tests ask of it."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from kvboost import KVBoost
from kvboost.server.runner import Server, in_background, listening_socket, make_server
from kvboost.server.service import Service
from kvboost.server.settings import ServerSettings

MODEL = "tiny"
HELLO = [{"role": "user", "content": "hello there, who are you and what do you do all day long?"}]


@dataclass
class Running:
    """A server, its address, and a client."""

    url: str
    server: Server
    client: httpx.Client

    @property
    def service(self) -> Service:
        return self.server.service

    def chat(self, messages: Any = HELLO, **fields: Any) -> dict[str, Any]:
        """The body of an answer that must be one."""
        return self.post("/v1/chat/completions", model=MODEL, messages=messages, **fields)

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        return self.post("/v1/completions", model=MODEL, prompt=prompt, **fields)

    def post(self, route: str, **body: Any) -> dict[str, Any]:
        response = self.client.post(route, json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def chunks(self, route: str, **body: Any) -> list[dict[str, Any]]:
        """The chunks of a streamed answer, which must end as it should."""
        response = self.client.post(route, json={"model": MODEL, "stream": True, **body})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        events = events_of(response.text)
        assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]

    def chat_chunks(self, messages: Any = HELLO, **fields: Any) -> list[dict[str, Any]]:
        return self.chunks("/v1/chat/completions", messages=messages, **fields)

    def settle(self) -> None:
        """Wait for the end of the step that gave the last answers: storing and counting come there."""
        self.service.worker.call(lambda: None).result(30)

    def stats(self, **parameters: Any) -> dict[str, Any]:
        self.settle()
        found: dict[str, Any] = self.client.get("/v1/cache/stats", params=parameters).json()
        return found

    def until(self, condition: Callable[[dict[str, int]], bool], within_s: float = 10) -> None:
        """Wait for the worker to be as wanted."""
        wait_for(lambda: condition(vars(self.service.worker.stats)), within_s)


Serve = Callable[..., Running]


def wait_for(condition: Callable[[], bool], within_s: float = 10) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def events_of(text: str) -> list[str]:
    """The data of server-sent events."""
    events = text.split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") for event in events)
    return [event.removeprefix("data: ") for event in events]


def joined(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """The text of one choice of a streamed chat."""
    deltas = [
        choice["delta"].get("content", "")
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == index
    ]
    return "".join(deltas)


@contextmanager
def _with_send_buffer(sock: socket.socket, size: int | None) -> Iterator[None]:
    """Connections of a listening socket inherit its buffers."""
    if size is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
    yield


@contextmanager
def running(engine: KVBoost, *, send_bytes: int | None = None, **settings: Any) -> Iterator[Running]:
    """A server; `send_bytes` is what the system takes of an answer that nobody reads."""
    options = {"model_name": MODEL, "shutdown_timeout_s": 0.0, **settings}
    server = make_server(engine, ServerSettings(**options))
    with (
        listening_socket("127.0.0.1", 0) as sock,
        _with_send_buffer(sock, send_bytes),
        in_background(server, sock) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield Running(url, server, client)
    assert not server.service.worker.is_alive
    assert server.service.worker.stats.running == server.service.worker.stats.waiting == 0
