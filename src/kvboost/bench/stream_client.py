"""A small HTTP client for load: one request per connection, and the time of every piece that is streamed.

Plain asyncio streams, because it shares the machine with the server that it measures. Knows OpenAI's
completions as far as their stream goes; knows no server and no benchmark.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

_LINE_BYTES = 4 * 1024 * 1024  # longest line that is read
_MARK = b"data:"
_DONE = b"[DONE]"


class ClientError(Exception):
    """No answer: the connection failed, or what came is no HTTP."""


@dataclass(frozen=True)
class Address:
    """Where a server listens."""

    host: str
    port: int


@dataclass
class Reply:
    """What came of a request; times are of `time.perf_counter`."""

    asked_at: float
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    token_times: list[float] = field(default_factory=list)  # of every piece with text
    ended_at: float = 0.0
    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    tokens: list[tuple[str, dict[str, float]]] = field(
        default_factory=list
    )  # with the likeliest, if asked for
    body: bytes = b""  # of an answer that was not streamed
    error: str | None = None

    @property
    def is_answered(self) -> bool:
        """Whether the answer came to its end."""
        return self.error is None and self.status == 200 and self.finish_reason is not None

    @property
    def completion_tokens(self) -> int:
        """As the server counts them, which the pieces can only undercut: a token may have no text."""
        return int(self.usage.get("completion_tokens", len(self.token_times)))

    @property
    def cached_tokens(self) -> int | None:
        details = self.usage.get("prompt_tokens_details") or {}
        return details.get("cached_tokens")

    @property
    def ttft_s(self) -> float | None:
        return self.token_times[0] - self.asked_at if self.token_times else None

    @property
    def gaps_s(self) -> list[tuple[float, float]]:
        """When each later token came, and how long after the one before."""
        times = self.token_times
        return [(later, later - sooner) for sooner, later in itertools.pairwise(times)]

    @property
    def json(self) -> Any:
        """The body of an answer that was not streamed."""
        return json.loads(self.body)


async def ask(
    address: Address,
    path: str,
    body: Any = None,
    *,
    headers: dict[str, str] | None = None,
    asked_at: float | None = None,
    leave_after: int | None = None,
) -> Reply:
    """Send one request (a GET without a body) and read the answer to its end.

    `asked_at` is when it was due, if that is not now. With `leave_after` the connection is dropped after so
    many pieces. Whatever goes wrong is in the reply.
    """
    reply = Reply(time.perf_counter() if asked_at is None else asked_at)
    try:
        async with _connected(address) as (reader, writer):
            writer.write(_request(address, path, body, headers or {}))
            with contextlib.suppress(ConnectionError):  # one that will not read it all may still answer
                await writer.drain()
            reply.status, reply.headers = await _read_head(reader)
            await _read_body(reader, reply, leave_after)
    except (OSError, asyncio.IncompleteReadError, ClientError, ValueError) as error:
        reply.error = f"{type(error).__name__}: {error}"
    reply.ended_at = time.perf_counter()
    return reply


@contextlib.asynccontextmanager
async def _connected(address: Address) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(address.host, address.port, limit=_LINE_BYTES)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _request(address: Address, path: str, body: Any, headers: dict[str, str]) -> bytes:
    content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"Host": f"{address.host}:{address.port}", "Connection": "close"}
    if body is not None:
        fields |= {"Content-Type": "application/json", "Content-Length": str(len(content))}
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in (fields | headers).items()]
    return "\r\n".join([*lines, "", ""]).encode() + content


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first = (await reader.readline()).split()
    if len(first) < 2 or not first[0].startswith(b"HTTP/"):
        raise ClientError("the server closed the connection without an answer")
    headers = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    return int(first[1]), headers


async def _read_body(reader: asyncio.StreamReader, reply: Reply, leave_after: int | None) -> None:
    if not reply.headers.get("content-type", "").startswith("text/event-stream"):
        reply.body = b"".join([piece async for piece in _pieces(reader, reply.headers)])
        return
    rest = b""
    async for piece in _pieces(reader, reply.headers):
        now = time.perf_counter()
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(_MARK):
                _read_event(line[len(_MARK) :].strip(), now, reply)
        if leave_after is not None and len(reply.token_times) >= leave_after:
            return


async def _pieces(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """The body as it arrives."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := _size(await reader.readline()):
            yield await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
    elif (length := headers.get("content-length")) is not None:
        yield await reader.readexactly(int(length))
    else:
        while piece := await reader.read(65536):
            yield piece


def _size(line: bytes) -> int:
    """Of the next piece."""
    if not line:
        raise ClientError("the connection was closed in the middle of an answer")
    return int(line.split(b";")[0], 16)


def _read_event(data: bytes, now: float, reply: Reply) -> None:
    if data == _DONE:
        return
    event = json.loads(data)
    if "error" in event:
        error = event["error"]
        reply.error = str(error.get("message", error) if isinstance(error, dict) else error)
        return
    reply.usage = event.get("usage") or reply.usage
    for choice in event.get("choices", ()):
        text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        if text:
            reply.text += text
            reply.token_times.append(now)
        if scores := choice.get("logprobs"):
            reply.tokens += zip(scores["tokens"], scores["top_logprobs"], strict=True)
        reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
