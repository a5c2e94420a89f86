"""What `bench serve` asks: prompts that share beginnings, when they arrive, and how they are sent.

Knows no server but by its address.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvboost.bench.serve_servers import LABELS
from kvboost.bench.stream_client import Address, Reply, ask
from kvboost.bench.text import TextSource

_ROUTE = "/v1/completions"


@dataclass(frozen=True)
class ServeSettings:
    """How much is asked, and how fast."""

    requests: int = 48
    rate: float = 8.0  # arrivals per second: more than anybody can keep up with
    prefixes: int = 4
    prefix_tokens: tuple[int, int] = (600, 1_000)
    tail_tokens: tuple[int, int] = (20, 60)
    documents: int = 0  # in every prompt, each time in another order; then nothing else is shared
    document_tokens: tuple[int, int] = (300, 500)
    new_tokens: int = 48
    rounds: int = 1
    contestants: tuple[str, ...] = tuple(LABELS)
    long_tokens: int = 4_000  # of the prompt that arrives in the middle; 0 = that part is left out
    steady_requests: int = 32
    steady_rate: float = 1.0  # less than kvboost can keep up with
    steady_new_tokens: int = 48
    serve_flags: tuple[str, ...] = ()  # more of them for both of kvboost's servers
    deadline_s: float = 900.0  # for a server to answer everything
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"


@dataclass(frozen=True)
class Arrival:
    """A request, and when it is due."""

    at_s: float
    prompt: str
    new_tokens: int


class Workload:
    """Prompts that share beginnings, as text, and when they arrive."""

    def __init__(self, tokenizer: Any, settings: ServeSettings) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        self._text = TextSource(tokenizer, 0)

    def beginnings(self, seed: int) -> list[list[int]]:
        """New ones, as token ids; their lengths are the same for the same seed."""
        draw = random.Random(self._settings.seed + seed)
        bounds = self._settings.prefix_tokens
        return [self._text.fresh(draw.randint(*bounds)) for _ in range(self._settings.prefixes)]

    def load(
        self, beginnings: Sequence[list[int]], requests: int, rate: float, new_tokens: int, seed: int
    ) -> list[Arrival]:
        """Poisson arrivals; each continues a beginning by a tail of its own.

        Tails are new every time; their lengths and the times are the same for the same seed.
        """
        draw = random.Random(self._settings.seed + seed)
        arrivals = []
        at_s = 0.0
        for number in range(requests):
            tail = self._text.fresh(draw.randint(*self._settings.tail_tokens))
            prompt = self.text(beginnings[number % len(beginnings)] + tail)
            arrivals.append(Arrival(at_s, prompt, new_tokens))
            at_s += draw.expovariate(rate)
        return arrivals

    def documents(self, seed: int, tokens: int = 0) -> list[str]:
        """New ones: as many as every prompt has, or as many as `tokens` tokens take."""
        draw = random.Random(self._settings.seed + seed)
        bounds = self._settings.document_tokens
        count = -(-tokens // bounds[1]) if tokens else self._settings.documents
        lengths = [bounds[1] if tokens else draw.randint(*bounds) for _ in range(count)]
        return [self.text(self._text.fresh(length)).strip() for length in lengths]

    def rag_load(
        self, documents: Sequence[str], requests: int, rate: float, new_tokens: int, seed: int
    ) -> list[Arrival]:
        """Poisson arrivals; each has all documents in an order of its own, and a question of its own."""
        draw = random.Random(self._settings.seed + seed)
        arrivals = []
        at_s = 0.0
        for _ in range(requests):
            arrivals.append(Arrival(at_s, self.reordered(documents, draw), new_tokens))
            at_s += draw.expovariate(rate)
        return arrivals

    def reordered(self, documents: Sequence[str], draw: random.Random) -> str:
        """The documents in a random order, behind a line of its own and before a question.

        So no prompt begins like an earlier one: what is reused does not depend on who was answered when.
        """
        topic, question = (
            self.text(self._text.fresh(tokens)).strip()
            for tokens in (8, draw.randint(*self._settings.tail_tokens))
        )
        return "\n\n".join([topic, *draw.sample(documents, len(documents)), question])

    def long(self, tokens: int) -> str:
        """A long text that shares nothing with others."""
        return self.text(self._text.fresh(tokens))

    def text(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids))


async def send(
    address: Address,
    model: str,
    load: Sequence[Arrival],
    deadline_s: float,
    fields: Mapping[str, Any] | None = None,
) -> list[Reply]:
    """Send every request when it is due, whatever became of those before; replies in the same order.

    `fields` are further ones of every request.
    """
    started = time.perf_counter()

    async def one(arrival: Arrival) -> Reply:
        due = started + arrival.at_s
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        body = {
            "model": model,
            "prompt": arrival.prompt,
            "max_tokens": arrival.new_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **(fields or {}),
        }
        left_s = started + deadline_s - time.perf_counter()
        try:
            return await asyncio.wait_for(ask(address, _ROUTE, body, asked_at=due), left_s)
        except asyncio.TimeoutError:
            return Reply(due, error=f"not answered in {deadline_s:g} s", ended_at=time.perf_counter())

    return list(await asyncio.gather(*map(one, load)))
