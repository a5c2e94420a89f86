"""Clients that mean harm, and a tenant beside them who only wants a short answer.

They run in a process of their own, so that what is measured is the server and not its clients' event loop.
Knows the server by its HTTP interface only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvboost.bench.stream_client import Address, Reply, ask

VICTIM, FLOODER, VANDAL = "ann", "eve", "mal"
CHAT = "/v1/chat/completions"
LOOKS = ("/health", "/metrics", "/")
HOSTILE_CLIENTS = 64
_MOST_PAUSE_S = 0.2
_NEVER_READ_S = 8.0


def _chat(model: str, content: str, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": content}]
    return json.dumps({"model": model, "messages": messages, **fields}).encode()


class HostileClients:
    """What the attackers do, all at once, each of them one thing over and over."""

    def __init__(self, address: Address, model: str, seed: int) -> None:
        self._address = address
        self._draw = random.Random(seed)
        self.counts: Counter[str] = Counter()
        turn = [{"role": "user", "content": "and then?"}, {"role": "assistant", "content": "nothing much."}]
        self._history = json.dumps({"model": model, "messages": [*turn * 8_000, turn[0]]}).encode()
        self._digits = _chat(model, "0123456789" * 390_000)
        self._some_digits = _chat(model, "0123456789" * 9_000)
        self._spaces = _chat(model, " " * 120_000)
        self._many = _chat(model, "tell me all", stream=True, n=8, max_tokens=400)
        self._flood = [_chat(model, f"story {n}: tell me more", max_tokens=300) for n in range(40)]
        self._long = [_chat(model, f"{n} " + "far away " * 900, max_tokens=50) for n in range(10)]

    @property
    def kinds(self) -> list[Callable[[], Awaitable[None]]]:
        return [
            self.send_a_huge_history,
            self.send_huge_digits,
            self.never_read,
            self.vanish,
            self.flood,
            self.flood,
            self.flood_with_long_prompts,
            self.trickle,
        ]

    async def run(self, clients: int, seconds: float) -> None:
        until = time.monotonic() + seconds
        kinds = self.kinds

        async def client(number: int) -> None:
            action = kinds[number % len(kinds)]
            while time.monotonic() < until:
                with contextlib.suppress(OSError, asyncio.TimeoutError):
                    await asyncio.wait_for(action(), max(0.1, until - time.monotonic()))
                await asyncio.sleep(self._draw.uniform(0.0, _MOST_PAUSE_S))

        await asyncio.gather(*(client(number) for number in range(clients)))

    async def send_a_huge_history(self) -> None:
        self._note(await self._ask(self._history, VANDAL), "history")

    async def send_huge_digits(self) -> None:
        body = self._draw.choice([self._digits, self._some_digits, self._spaces])
        self._note(await self._ask(body, VANDAL), "digits")

    async def flood(self) -> None:
        self._note(await self._ask(self._draw.choice(self._flood), FLOODER), "flood")

    async def flood_with_long_prompts(self) -> None:
        self._note(await self._ask(self._draw.choice(self._long), FLOODER), "long")

    async def never_read(self) -> None:
        async with self._sent(self._many, FLOODER):
            self.counts["never read"] += 1
            await asyncio.sleep(self._draw.uniform(1.0, _NEVER_READ_S))

    async def vanish(self) -> None:
        body = self._draw.choice([self._history, self._digits, self._flood[0], self._long[0]])
        async with self._sent(body, self._draw.choice((FLOODER, VANDAL))):
            self.counts["vanished"] += 1
            await asyncio.sleep(self._draw.uniform(0.0, 0.3))

    async def trickle(self) -> None:
        """A body that comes byte by byte."""
        async with self._sent(self._long[0][:50], VANDAL, promised=len(self._long[0])) as writer:
            self.counts["trickled"] += 1
            for byte in self._long[0][50:100]:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.05)

    async def _ask(self, body: bytes, key: str) -> Reply:
        return await ask(self._address, CHAT, body, headers={"Authorization": f"Bearer {key}"})

    def _note(self, reply: Reply, what: str) -> None:
        self.counts[f"{what} {reply.status}"] += 1

    @contextlib.asynccontextmanager
    async def _sent(self, body: bytes, key: str, promised: int | None = None) -> Any:
        _, writer = await asyncio.open_connection(self._address.host, self._address.port)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {promised or len(body)}\r\n\r\n"
        try:
            writer.write(head.encode() + body)
            yield writer
        finally:
            writer.transport.abort()


def _attack(address: Address, model: str, clients: int, seconds: float, seed: int, told: Any) -> None:
    hostile = HostileClients(address, model, seed)
    asyncio.run(hostile.run(clients, seconds))
    told.put(dict(hostile.counts))


@contextmanager
def under_attack(
    address: Address, model: str, seconds: float, seed: int = 0
) -> Iterator[Callable[[], dict[str, int]]]:
    """Hostile clients until the block ends, `seconds` at most; yields what to ask for their counts."""
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    arguments = (address, model, HOSTILE_CLIENTS, seconds, seed, told)
    process = context.Process(target=_attack, args=arguments, daemon=True)
    process.start()
    try:
        yield lambda: told.get(timeout=60)
    finally:
        process.join(seconds + 30)
        process.kill()


async def short_requests(
    address: Address, model: str, count: int, pause_s: float, seed: int, until: float = math.inf
) -> list[Reply]:
    """Short prompts that nobody has sent before, one after the other; after `until` no more are asked."""
    replies: list[Reply] = []
    loop = asyncio.get_running_loop()
    for number in range(count):
        if loop.time() >= until:
            break
        body = _chat(model, f"Request {seed}.{number}: what is the capital of France?", max_tokens=1)
        fields = {**json.loads(body), "stream": True, "temperature": 0}
        replies.append(await ask(address, CHAT, fields, headers={"Authorization": f"Bearer {VICTIM}"}))
        await asyncio.sleep(pause_s)
    return replies


async def look_around(address: Address, key: str, until: Callable[[], bool]) -> dict[str, float]:
    """The longest time that each of the smaller routes took."""
    longest = dict.fromkeys(LOOKS, 0.0)
    while not until():
        for route in LOOKS:
            started = time.perf_counter()
            reply = await ask(address, route, headers={"Authorization": f"Bearer {key}"})
            longest[route] = max(longest[route], time.perf_counter() - started)
            assert reply.status == 200, (route, reply)
        await asyncio.sleep(0.2)
    return longest
