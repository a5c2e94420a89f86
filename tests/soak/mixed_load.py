"""Clients of every kind at once: good ones, bad ones, impatient ones, and crowds.

Every request has a set of answers that are right for it; anything else is noted as wrong. Knows the
server by its HTTP interface only.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvboost.bench.stream_client import Address, Reply, ask

KEYS = ("ann", "bob", "eve")  # ann and bob have salts of their own
ADMIN = "root"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SERVED = frozenset({200, 408, 429})  # answered, too late, or refused since too many wait
HANGS_S = 120.0  # a request that gets no answer in this time is stuck
MOST_NOTES = 20


@dataclass
class Counts:
    """What became of the requests."""

    actions: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    asked: int = 0
    left: int = 0  # the client went away before the end
    cached_tokens: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    compared: int = 0  # answers to known questions
    wrong: list[str] = field(default_factory=list)

    def note(self, what: str) -> None:
        if len(self.wrong) < MOST_NOTES:
            self.wrong.append(what)


@dataclass(frozen=True)
class Limits:
    """What is long, short and many, for the model that is asked."""

    document_characters: int
    question_characters: int
    new_tokens: int
    crowd: int


class MixedLoad:
    """Some clients that go on until they are told to stop."""

    def __init__(
        self, address: Address, model: str, texts: Sequence[str], limits: Limits, seed: int = 0
    ) -> None:
        self.counts = Counts()
        self._address = address
        self._model = model
        self._draw = random.Random(seed)
        self._limits = limits
        length = limits.document_characters
        self._source = "\n".join(texts)
        self._documents = [self._source[start : start + length] for start in range(0, 12 * length, length)]
        self._known: dict[str, str] = {}
        self._actions: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            (30, self.stream),
            (20, self.complete),
            (12, self.know),
            (14, self.vanish_from_a_stream),
            (8, self.vanish_while_waiting),
            (14, self.send_something_wrong),
            (2, self.flood),
            (5, self.warm),
            (5, self.explain),
            (3, self.look_around),
            (2, self.pin),
            (1, self.clear),
        ]

    async def run(self, clients: int, seconds: float) -> None:
        """All clients at once, each doing one thing after the other, at random."""
        until = time.monotonic() + seconds
        weights = [weight for weight, _ in self._actions]

        async def client() -> None:
            while time.monotonic() < until:
                _, action = self._draw.choices(self._actions, weights)[0]
                self.counts.actions[action.__name__] += 1
                await action()

        await asyncio.gather(*(client() for _ in range(clients)))

    # --- requests that are answered ----------------------------------------------------------

    async def learn(self, count: int) -> None:
        """Ask some questions while nobody else does, to know the answers later."""
        for number in range(count):
            prompt = self._documents[number % 3] + f"\n\nQuestion {number}:"
            reply = await self.ask(COMPLETIONS, self.greedy(prompt), KEYS[0], {200})
            self._known[prompt] = reply.json["choices"][0]["text"]

    async def know(self) -> None:
        """A known question has the known answer, whatever else is going on."""
        prompt = self._draw.choice(list(self._known))
        reply = await self.ask(COMPLETIONS, self.greedy(prompt), self.key(), SERVED)
        if reply.status == 200:
            self.counts.compared += 1
            text = reply.json["choices"][0]["text"]
            if text != self._known[prompt]:
                self.counts.note(f"another answer: {text!r} instead of {self._known[prompt]!r}")

    async def stream(self) -> None:
        fields = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
        body = {**self.messages(), "max_tokens": self.new_tokens(), **fields}
        reply = await self.ask(CHAT, body, self.key(), SERVED)
        if reply.status == 200 and reply.error is None and not reply.is_answered:
            self.counts.note("a stream that ended before the answer did")
        if reply.error is not None and "longer than" not in reply.error:
            self.counts.note(f"a stream ended with {reply.error}")

    async def complete(self) -> None:
        draw = self._draw
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": self.prompt(),
            "max_tokens": self.new_tokens(),
        }
        options: list[dict[str, Any]] = [
            {"temperature": 0},
            {"temperature": 0.8, "seed": draw.randrange(1000), "n": 2},
            {"temperature": 1.0, "top_p": 0.9},
            {"temperature": 0, "logprobs": 3},
            {"temperature": 0, "stop": ["e", "\n"]},
            {"temperature": 0, "frequency_penalty": 0.5, "presence_penalty": 0.5},
            {"temperature": 0, "cache_salt": f"tenant {draw.randrange(3)}"},
            {"temperature": 0, "prompt": [self.prompt(), self.prompt()]},
        ]
        await self.ask(COMPLETIONS, body | draw.choice(options), self.key(), SERVED)

    async def warm(self) -> None:
        body = {"prompt": self._draw.choice(self._documents)}
        await self.ask("/v1/cache/warm", body, self.key(), SERVED)

    async def explain(self) -> None:
        await self.ask("/v1/cache/explain", {"prompt": self.prompt()}, self.key(), {200})

    async def pin(self) -> None:
        """Pins are taken back, or the cache would have no room for anything else."""
        body = {"prompt": self._documents[0]}
        await self.ask("/v1/cache/pin", body, ADMIN, {200})
        await self.ask("/v1/cache/unpin", body, ADMIN, {200})

    async def clear(self) -> None:
        await self.ask("/v1/cache/clear", b"", ADMIN, {200})

    async def look_around(self) -> None:
        for path in ("/v1/cache/stats?chunks=50", "/metrics", "/v1/models", "/health", "/ready", "/"):
            await self.ask(path, None, ADMIN, {200})

    # --- requests that are not ---------------------------------------------------------------

    async def vanish_from_a_stream(self) -> None:
        body = {**self.messages(), "max_tokens": 4 * self._limits.new_tokens, "stream": True}
        after = self._draw.randrange(4)
        self.counts.left += 1
        await self.ask(CHAT, body, self.key(), SERVED, leave_after=after)

    async def vanish_while_waiting(self) -> None:
        body = {**self.messages(), "max_tokens": 4 * self._limits.new_tokens}
        task = asyncio.create_task(ask(self._address, CHAT, body, headers=_headers(self.key())))
        self.counts.left += 1
        await asyncio.wait({task}, timeout=self._draw.uniform(0.0, 0.6))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def send_something_wrong(self) -> None:
        good = {"model": self._model, "prompt": "hello", "max_tokens": 1}
        wrong: list[tuple[str, Any, str | None, int]] = [
            (COMPLETIONS, {**good, "colour": "blue"}, KEYS[0], 400),
            (COMPLETIONS, {**good, "max_tokens": "many"}, KEYS[0], 400),
            (COMPLETIONS, {**good, "temperature": 9}, KEYS[1], 400),
            (COMPLETIONS, {**good, "prompt": []}, KEYS[1], 400),
            (COMPLETIONS, {**good, "prompt": [10**7]}, KEYS[1], 400),
            (COMPLETIONS, {**good, "prompt": self._source[:150_000]}, KEYS[2], 400),  # no room for it
            (COMPLETIONS, {**good, "prompt": "x" * 300_000}, KEYS[2], 413),
            (COMPLETIONS, {**good, "model": "another"}, KEYS[2], 404),
            (COMPLETIONS, b'{"model": ', KEYS[0], 400),
            (COMPLETIONS, good, None, 401),
            (COMPLETIONS, good, "mallory", 401),
            (CHAT, {"model": self._model, "messages": [{"role": "king", "content": "x"}]}, KEYS[0], 400),
            ("/v1/cache/clear", b"", KEYS[0], 403),
            ("/v1/cache/stats", None, KEYS[0], 403),
            ("/v1/nothing", None, KEYS[0], 404),
            (COMPLETIONS, None, KEYS[0], 405),
        ]
        path, body, key, status = self._draw.choice(wrong)
        reply = await self.ask(path, body, key, {status})
        if reply.status == status and "error" not in reply.json:
            self.counts.note(f"{path}: {status} without an error")

    async def flood(self) -> None:
        """More at once than the queue has room for: some are refused, and told when to come back."""
        bodies = [{**self.messages(), "max_tokens": 2, "temperature": 0} for _ in range(self._limits.crowd)]
        replies = await asyncio.gather(*(self.ask(CHAT, body, self.key(), SERVED) for body in bodies))
        for reply in replies:
            if reply.status == 429 and not 1 <= int(reply.headers.get("retry-after", "0")) <= 60:
                self.counts.note("a refusal that does not say when to come back")

    # --- parts -------------------------------------------------------------------------------

    async def ask(
        self, path: str, body: Any, key: str | None, expected: set[int] | frozenset[int], **options: Any
    ) -> Reply:
        """Send it, and see that what comes is among what may come."""
        self.counts.asked += 1
        try:
            reply = await asyncio.wait_for(
                ask(self._address, path, body, headers=_headers(key), **options), HANGS_S
            )
        except asyncio.TimeoutError:
            self.counts.note(f"{path}: no answer in {HANGS_S:g} s")
            return Reply(0.0, error="no answer")
        self.counts.statuses[reply.status] += 1
        if reply.status not in expected:
            self.counts.note(f"{path}: {reply.status} {reply.error} {reply.body[:200]!r}")
        self._count(reply)
        return reply

    def _count(self, reply: Reply) -> None:
        usage = reply.usage
        if reply.body.startswith(b'{"id"'):
            usage = json.loads(reply.body).get("usage") or {}
        self.counts.prompt_tokens += usage.get("prompt_tokens", 0)
        self.counts.completion_tokens += usage.get("completion_tokens", 0)
        details = usage.get("prompt_tokens_details") or {}
        self.counts.cached_tokens += details.get("cached_tokens", 0)

    def greedy(self, prompt: str) -> dict[str, Any]:
        new_tokens = self._limits.new_tokens
        return {"model": self._model, "prompt": prompt, "max_tokens": new_tokens, "temperature": 0}

    def messages(self) -> dict[str, Any]:
        messages = [
            {"role": "system", "content": self._draw.choice(self._documents)},
            {"role": "user", "content": self.question()},
        ]
        return {"model": self._model, "messages": messages}

    def prompt(self) -> str:
        """A document that others ask about too, or a part of one, and something new."""
        document = self._draw.choice(self._documents)
        return document[: self._draw.randint(len(document) // 4, len(document))] + self.question()

    def question(self) -> str:
        start = self._draw.randrange(len(self._source) - self._limits.question_characters)
        return self._source[start : start + self._draw.randint(5, self._limits.question_characters)]

    def key(self) -> str:
        return self._draw.choice(KEYS)

    def new_tokens(self) -> int:
        return self._draw.randint(1, 2 * self._limits.new_tokens)


def _headers(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}
