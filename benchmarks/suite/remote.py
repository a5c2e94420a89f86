"""`bench remote`: what an answer out of a shared store saves, and what reading there costs.

The store is one that runs already. One engine writes a text there; then fresh engines, which know nothing,
answer questions about it: out of the store, out of their RAM, and without a cache, taking turns. Their
reading (look-up, checksums, a copy into tensors, entry in the tree) is compared with one pipelined GET of
the same bytes. What was written is deleted at the end. Knows no terminal.
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from random import Random
from typing import Any

import numpy as np

from kvboost.bench.prefix import spread_rounds
from kvboost.bench.record import at_least, at_most, head_of, spread
from kvboost.errors import KVBoostError
from kvboost.remote import inventory
from kvboost.remote.byte_store import ByteStore, open_store
from kvboost.remote.keys import tenant_prefix

Report = Callable[[int, int, str], None]
OpenEngine = Callable[..., Any]
MIN_READ = 0.5
MIN_SPEEDUP = {"redis": 10.0, "s3": 5.0}
MAX_TRIPS = 1.0
_QUESTION_TOKENS = 24  # too few to be asked for
_CLIENTS = {"redis": ("redis", "hiredis"), "s3": ("obstore",)}


@dataclass(frozen=True)
class RemoteSettings:
    """What is measured: `rounds` of everything for each of `lengths`, BASELINE `plain_rounds` times.

    `server` is what the record says about the store.
    """

    lengths: tuple[int, ...] = (1_024, 4_096)
    rounds: int = 5
    plain_rounds: int = 2
    seed: int = 0
    server: str = ""


def run(
    engine: Any,
    model: str,
    settings: RemoteSettings,
    address: str,
    open_engine: OpenEngine,
    report: Report = lambda _done, _total, _text: None,
) -> dict[str, Any]:
    """Measure on the store at `address`, and return the record."""
    kind = "s3" if address.startswith("s3://") else "redis"
    head = head_of(f"remote-{kind}", engine, model, settings)
    clients = {name: _version(name) for name in _CLIENTS[kind]}
    steps = len(settings.lengths) * (1 + settings.rounds)
    random = Random(settings.seed)
    results = []
    for number, tokens in enumerate(settings.lengths):
        with _Bench(engine, tokens, random, address, open_engine) as bench:
            done = number * (1 + settings.rounds)
            report(done, steps, f"{tokens:,} tokens: filling the store")
            bench.fill()
            for turn in range(settings.rounds):
                report(done + 1 + turn, steps, f"{tokens:,} tokens: answers and reads")
                bench.take_turn(plainly=turn in spread_rounds(settings.plain_rounds, settings.rounds))
            results.append(bench.results())
    report(steps, steps, "done")
    return {**head, "clients": clients, "lengths": results, "targets": targets(kind, results)}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


class _Bench:
    """One length. The text has a salt of its own, which nobody else has."""

    def __init__(
        self, engine: Any, tokens: int, random: Random, address: str, open_engine: OpenEngine
    ) -> None:
        self._engine = engine
        self._tokens = tokens
        self._random = random
        self._vocabulary = engine.model.config.get_text_config(decoder=True).vocab_size
        self._prefix = self._some_ids(tokens)
        self._salt = secrets.token_hex(16)
        self._address = address
        self._open_engine = open_engine
        self._store: ByteStore = open_store(address)
        self._parts: list[str] = []
        self._part_bytes = 0
        self._ttft: dict[str, list[float]] = {"baseline": [], "ram": [], "remote": []}
        self._rates: dict[str, list[float]] = {"bare": [], "read": []}
        self._trips: list[int] = []
        self._same_first_token: list[bool] = []

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *_: object) -> None:
        names = inventory.listed(self._store, tenant_prefix(self._salt), _quietly)
        inventory.delete(self._store, list(names), _quietly)
        self._store.close()

    def _some_ids(self, count: int) -> list[int]:
        return [self._random.randrange(self._vocabulary) for _ in range(count)]

    def _opened(self, writes: str = "reused") -> Any:
        options = {"remote_cache": self._address, "remote_write": writes, "cache_salt": self._salt}
        return self._open_engine(**options, max_chunks=None)

    def fill(self) -> None:
        """Have an engine write the text."""
        with self._opened("all") as engine:
            engine.warm(self._prefix)
            if not engine.core.parts.remote.flush():
                raise KVBoostError(f"the store did not take it all: {engine.cache_stats()['remote']}")
        names = inventory.listed(self._store, tenant_prefix(self._salt), _quietly)
        stored = {name: inventory.read_name(name) for name in names}
        self._parts = [name for name, each in stored.items() if each is not None and _is_part(each)]
        self._part_bytes = sum(names[name] for name in self._parts)

    def take_turn(self, *, plainly: bool) -> None:
        """Everything once."""
        question = self._some_ids(_QUESTION_TOKENS)
        prompt = self._prefix + question
        with self._opened() as engine:
            engine.generate(self._some_ids(_QUESTION_TOKENS), max_new_tokens=1)  # the first forward is slow
            found = self._timed(engine, prompt, "remote")
            engine.warm(self._prefix[:1])  # so that nothing is in place from the last answer
            engine.core.resident.drop()
            self._timed(engine, self._prefix + self._some_ids(_QUESTION_TOKENS), "ram")
        if plainly:
            result = self._engine.generate(prompt, max_new_tokens=1, mode="baseline")
            self._ttft["baseline"].append(result.ttft_ms)
            self._same_first_token.append(result.token_ids[0] == found)
        self._look_up(prompt)
        self._read_all(prompt)
        started = time.perf_counter()
        values = bare_get(self._store, self._parts)
        self._rates["bare"].append(self._part_bytes / (time.perf_counter() - started))
        if sum(len(value) for value in values if value is not None) != self._part_bytes:
            raise KVBoostError("the store has dropped a part: give it more memory")

    def _timed(self, engine: Any, prompt: list[int], what: str) -> int:
        result = engine.generate(prompt, max_new_tokens=1, mode="prefix_cache")
        if result.cached_tokens < self._tokens:
            stats = engine.cache_stats()["remote"]
            raise KVBoostError(f"only {result.cached_tokens} of {self._tokens} tokens were found: {stats}")
        self._ttft[what].append(result.ttft_ms)
        return int(result.token_ids[0])

    def _look_up(self, prompt: list[int]) -> None:
        """How many round trips a question takes, without the reading."""
        with self._opened() as engine:
            before = engine.cache_stats()["remote"]["round_trips"]
            engine.explain(prompt)
            self._trips.append(engine.cache_stats()["remote"]["round_trips"] - before)

    def _read_all(self, prompt: list[int]) -> None:
        """How fast an engine that knows nothing has everything in its tree."""
        with self._opened() as engine:
            parts = engine.core.parts
            ids, namespace = np.array(prompt), parts.namespace()
            started = time.perf_counter()
            parts.remote.look_ahead(ids, namespace, len(prompt) - 1, False)
            seconds = time.perf_counter() - started
            stats = parts.remote.stats()
            if stats["read_tokens"] < self._tokens:
                raise KVBoostError(f"only {stats['read_tokens']} of {self._tokens} tokens were read: {stats}")
            self._rates["read"].append(self._part_bytes / seconds)

    def results(self) -> dict[str, Any]:
        ttft = {who: spread(times) for who, times in self._ttft.items()}
        ratios = [a / b for a, b in zip(self._rates["read"], self._rates["bare"], strict=True)]
        return {
            "tokens": self._tokens,
            "bytes": self._part_bytes,
            "parts": len(self._parts),
            "ttft_ms": ttft,
            "speedup": round(ttft["baseline"]["median"] / ttft["remote"]["median"], 2),
            "same_first_token": all(self._same_first_token),
            "read_gb_s": round(statistics.median(self._rates["read"]) / 1e9, 3),
            "bare_gb_s": round(statistics.median(self._rates["bare"]) / 1e9, 3),
            "read_of_bare": round(statistics.median(ratios), 3),
            "lookup_trips": max(self._trips),
        }


def bare_get(store: Any, names: Sequence[str]) -> Sequence[Any]:
    """Whole values as the client itself gets them in one pipeline, or all at once. Nothing is checked."""
    if store.name.startswith("s3://"):
        return list(store.read(names))  # ranges: obstore is many times slower with whole objects
    pipeline = store._client.pipeline(transaction=False)
    for name in names:
        pipeline.get(name)
    return list(pipeline.execute())


def _is_part(name: inventory.StoredName) -> bool:
    return name.number is not None and not name.is_claim


def _quietly(_done: int, _total: int | None) -> None:
    pass


def targets(kind: str, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was to be reached, what was, and whether that is enough; at the longest text."""
    longest = max(results, key=lambda each: int(each["tokens"]))
    sooner = f"first token from the store at {longest['tokens']:,} tokens, times sooner than BASELINE"
    return [
        at_least(sooner, longest["speedup"], MIN_SPEEDUP[kind]),
        at_least("read, of a bare pipelined GET", longest["read_of_bare"], MIN_READ),
        at_most("round trips of a look-up", max(each["lookup_trips"] for each in results), MAX_TRIPS),
    ]
