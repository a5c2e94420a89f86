"""Requests whose right answers are known, for engines whose shared store fails meanwhile."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

from kvboost import KVBoost
from tests.tiny_models import random_ids

_BEGINNINGS = 4
_NEW_TOKENS = 2


@dataclass
class Outcome:
    """What became of some requests."""

    requests: int = 0
    wrong: int = 0
    failed: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    cached_tokens: int = 0

    @property
    def slowest(self) -> float:
        return max(self.seconds, default=0.0)

    @property
    def is_right(self) -> bool:
        return not self.wrong and not self.failed


class Traffic:
    """Prompts with some beginnings in common, and what the model says to each without any reuse."""

    def __init__(self, engine: KVBoost, count: int = 12, seed: int = 0, tokens: int = 600) -> None:
        draw = random.Random(seed)
        self._draw = draw
        self.prompts = []
        for number in range(count):
            beginning = random_ids(tokens, seed=seed * 1000 + number % _BEGINNINGS)
            cut = draw.randrange(tokens // 2, tokens)
            self.prompts.append([*beginning[:cut], *random_ids(20, seed=seed * 1000 + 500 + number)])
        self.plain_s: list[float] = []
        self._expected = [self.plain(engine, number) for number in range(count)]

    def plain(self, engine: KVBoost, number: int) -> list[int]:
        """What the model says without any reuse; how long it took is noted."""
        started = time.monotonic()
        result = engine.generate(self.prompts[number], max_new_tokens=_NEW_TOKENS, mode="baseline")
        self.plain_s.append(time.monotonic() - started)
        return list(result.token_ids)

    def ask(self, engine: KVBoost, number: int, outcome: Outcome) -> int:
        """One request, counted; how many of its tokens were reused."""
        outcome.requests += 1
        started = time.monotonic()
        try:
            result = engine.generate(self.prompts[number], max_new_tokens=_NEW_TOKENS, mode="prefix_cache")
        except Exception as error:
            outcome.failed.append(f"{type(error).__name__}: {error}")
            return 0
        outcome.seconds.append(time.monotonic() - started)
        outcome.wrong += list(result.token_ids) != self._expected[number]
        outcome.cached_tokens += result.cached_tokens
        return result.cached_tokens

    def some(self, engine: KVBoost, count: int, outcome: Outcome | None = None) -> Outcome:
        """So many, drawn; before each the engine forgets all, so that the store is asked."""
        outcome = outcome or Outcome()
        for _ in range(count):
            engine.clear()
            number = self._draw.randrange(len(self.prompts))
            self.ask(engine, number, outcome)
            self.plain(engine, number)  # in turn, so that other work slows both down
        return outcome

    def fill(self, engine: KVBoost) -> None:
        """Have all of it written to the store."""
        remote = engine.core.parts.remote
        assert remote is not None
        for prompt in self.prompts:
            engine.generate(prompt, max_new_tokens=_NEW_TOKENS, mode="prefix_cache")
        assert remote.flush(30.0)

    def until_reused(self, engine: KVBoost, within_s: float) -> float:
        """Ask until the store answers again; after how long."""
        started = time.monotonic()
        outcome = Outcome()
        while True:
            engine.clear()
            if self.ask(engine, self._draw.randrange(len(self.prompts)), outcome):
                assert outcome.is_right, outcome
                return time.monotonic() - started
            took = time.monotonic() - started
            assert took < within_s, f"nothing was reused for {took:.1f} s: {engine.cache_stats()['remote']}"
            time.sleep(0.05)
