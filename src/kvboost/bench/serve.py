"""`bench serve`: requests over HTTP that arrive when they arrive, and how servers keep up with them.

Every server is a process of its own, started and ended by the benchmark, one after the other, with the same
model, the same prompts and the same arrivals. kvboost serve runs with and without its running batch,
transformers serve with and without continuous batching. A server that is not there, fails or hangs is
listed with the reason. Knows no terminal.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from kvboost.bench.peer_process import HTTP_PEER, reason_not_there
from kvboost.bench.record import machine_record
from kvboost.bench.server_process import ServerFailedError, ServerProcess
from kvboost.bench.stream_client import Address, Reply, ask
from kvboost.bench.text import TextSource
from kvboost.loading.embedded import BUILTIN_NAME, ensure_checkpoint

Report = Callable[[int, int, str], None]  # steps done, steps in all, what is being done

KVBOOST, ALONE, PAGED, PLAIN = "kvboost", "no_batching", "transformers_cb", "transformers"
LABELS = {
    KVBOOST: "kvboost serve",
    ALONE: "  --no-batching",
    PAGED: "transformers serve, continuous batching",
    PLAIN: "transformers serve",
}
KVBOOST_COMMAND = (sys.executable, "-c", "from kvboost.cli.main import main; main()")
PEER_FLAGS = ("--device", "cpu", "--dtype", "float32")
# What continuous batching runs best with on a CPU, tried with this workload.
PAGED_FLAGS = (
    "--continuous-batching",
    "--cb-max-memory-percent",
    "0.3",
    "--cb-max-batch-tokens",
    "512",
    "--cb-num-blocks",
    "64",
    "--no-cb-use-cuda-graph",
)
LEAST_OVER = {ALONE: 2.0, PAGED: 2.0, PLAIN: 4.0}
MAX_GAP_RATIO = 4.0
_ROUTE = "/v1/completions"
_START_S = 180.0
_LONG_NEW_TOKENS = 8
_STEADY_SEED = 1_000
_WARM_UP = ("The first request pays for", "fresh memory, and so does", "the first batch of several.")


@dataclass(frozen=True)
class ServeSettings:
    """How much is asked, and how fast."""

    requests: int = 48
    rate: float = 8.0  # arrivals per second: more than anybody can keep up with
    prefixes: int = 4
    prefix_tokens: tuple[int, int] = (600, 1_000)
    tail_tokens: tuple[int, int] = (20, 60)
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


@dataclass(frozen=True)
class Arrival:
    """A request, and when it is due."""

    at_s: float
    prompt: str
    new_tokens: int


@dataclass(frozen=True)
class Contestant:
    """How a server is started, and what it calls the model."""

    name: str
    command: tuple[str, ...]
    model: str
    ready_path: str
    environment: dict[str, str]
    folder: Path | None = None


def run(
    model: str,
    settings: ServeSettings,
    peers_folder: Path,
    report: Report = lambda _done, _total, _text: None,
) -> dict[str, Any]:
    """Measure and return the record."""
    machine = machine_record(torch.device("cpu"))
    bench = _Bench(model, settings, peers_folder, report)
    rounds = asyncio.run(bench.run())
    servers = {name: summary(rounds[name]) for name in settings.contestants if rounds[name]}
    _compare_texts(servers, rounds)
    return {
        "benchmark": "serve",
        "model": model,
        "dtype": "float32",
        "machine": machine,
        "settings": dataclasses.asdict(settings),
        "servers": {
            name: {"label": LABELS[name], **bench.about.get(name, {}), **found}
            for name, found in servers.items()
        },
        "unavailable": bench.unavailable,
        "long_prompt": bench.long_prompt,
        "targets": targets(servers, bench.long_prompt),
    }


# --- what is asked -------------------------------------------------------------------------------


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

    def long(self, tokens: int) -> str:
        """A long text that shares nothing with others."""
        return self.text(self._text.fresh(tokens))

    def text(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids))


# --- who answers ---------------------------------------------------------------------------------


def contestants(model: str, settings: ServeSettings, peer: Path) -> dict[str, Contestant]:
    """All that could take part; those of transformers only where `peer` is set up."""
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "HF_HUB_OFFLINE": "1"}
    ours = (*KVBOOST_COMMAND, "serve", model, "--port", "{port}", "--dtype", "float32")
    found = {
        name: Contestant(name, (*ours, *settings.serve_flags, *flags), model, "/ready", threads)
        for name, flags in ((KVBOOST, ()), (ALONE, ("--no-batching",)))
    }
    if (peer / "peer.json").is_file():
        about = json.loads((peer / "peer.json").read_text())
        checkpoint = checkpoint_of(model)
        theirs = (str(peer / about["python"]), *about["serve"], checkpoint, *PEER_FLAGS, "--port", "{port}")
        environment = {**threads, "PYTHONNOUSERSITE": "1", **about.get("environment", {})}
        for name, flags in ((PAGED, PAGED_FLAGS), (PLAIN, ())):
            command = (*theirs, "--host", "127.0.0.1", *flags)
            found[name] = Contestant(name, command, checkpoint, "/health", environment, peer)
    return found


def checkpoint_of(model: str) -> str:
    """The model as transformers loads it."""
    return str(ensure_checkpoint()) if model == BUILTIN_NAME else model


# --- the benchmark -------------------------------------------------------------------------------


class _Bench:
    """All servers in turns, and how far it is."""

    def __init__(self, model: str, settings: ServeSettings, peers_folder: Path, report: Report) -> None:
        self._settings = settings
        self._report = report
        self._peer = peers_folder / HTTP_PEER
        self._there = contestants(model, settings, self._peer)
        self._workload = Workload(AutoTokenizer.from_pretrained(checkpoint_of(model)), settings)
        self._done = 0
        self.about: dict[str, dict[str, Any]] = {}
        self.unavailable: list[dict[str, str]] = []
        self.long_prompt: dict[str, Any] | None = None

    async def run(self) -> dict[str, list[list[Reply]]]:
        """The replies of every server, round by round."""
        settings = self._settings
        found: dict[str, list[list[Reply]]] = {name: [] for name in settings.contestants}
        order = [name for name in settings.contestants if self._is_there(name)]
        for number in range(settings.rounds):
            load = self._workload.load(
                self._workload.beginnings(number),
                settings.requests,
                settings.rate,
                settings.new_tokens,
                seed=number,
            )
            first = number % len(order) if order else 0
            for name in order[first:] + order[:first]:
                self._step(f"round {number + 1} of {settings.rounds}: {LABELS[name].strip()}")
                with self._dropping(name):
                    found[name].append(await self._measure(self._there[name], load))
        if settings.long_tokens and KVBOOST in order:
            with self._dropping(KVBOOST):
                await self._measure_long(self._there[KVBOOST])
        return found

    def _is_there(self, name: str) -> bool:
        if name in self._there:
            return True
        self._drop(name, reason_not_there(self._peer) or "it is no server: run make peers")
        return False

    async def _measure(self, contestant: Contestant, load: Sequence[Arrival]) -> list[Reply]:
        """A fresh server under one load."""
        async with self._started(contestant) as address:
            return await send(address, contestant.model, load, self._settings.deadline_s)

    async def _measure_long(self, contestant: Contestant) -> None:
        """The same steady load twice, the second time with a long prompt in the middle.

        Its beginnings were read before, so that nothing but the long prompt makes the difference.
        """
        settings, workload = self._settings, self._workload
        shape = (settings.steady_requests, settings.steady_rate, settings.steady_new_tokens)
        async with self._started(contestant) as address:
            self._step("a steady load")
            beginnings = workload.beginnings(_STEADY_SEED)
            first = [Arrival(0.0, workload.text(beginning), 1) for beginning in beginnings]
            await send(address, contestant.model, first, settings.deadline_s)
            load = workload.load(beginnings, *shape, seed=_STEADY_SEED)
            without = await send(address, contestant.model, load, settings.deadline_s)
            self._step("the same with a long prompt")
            load = workload.load(beginnings, *shape, seed=_STEADY_SEED)
            at_s = load[len(load) // 4].at_s
            long = Arrival(at_s, workload.long(settings.long_tokens), _LONG_NEW_TOKENS)
            both = await send(address, contestant.model, [*load, long], settings.deadline_s)
        self.long_prompt = long_summary(without, both[:-1], both[-1])

    @contextlib.asynccontextmanager
    async def _started(self, contestant: Contestant) -> AsyncIterator[Address]:
        """A server that is up and has answered something."""
        server = ServerProcess(
            contestant.command,
            ready_path=contestant.ready_path,
            environment=contestant.environment,
            folder=contestant.folder,
        )
        try:
            start_s = await server.wait_until_ready(_START_S)
            warm_up = [Arrival(0.0, text, 8) for text in _WARM_UP]
            for reply in await send(server.address, contestant.model, warm_up, _START_S):
                if not reply.is_answered:
                    raise ServerFailedError(f"the first requests: {_reason(reply)}")
            self.about[contestant.name] = {
                "command": [Path(word).name if word.startswith("/") else word for word in contestant.command],
                "start_s": round(start_s, 1),
            }
            yield server.address
        finally:
            server.stop()

    @contextlib.contextmanager
    def _dropping(self, name: str) -> Iterator[None]:
        try:
            yield
        except ServerFailedError as error:
            self._drop(name, str(error))

    def _drop(self, name: str, reason: str) -> None:
        self.unavailable.append({"name": name, "label": LABELS[name].strip(), "reason": reason})

    def _step(self, text: str) -> None:
        settings = self._settings
        long = 2 if settings.long_tokens and KVBOOST in settings.contestants else 0
        self._report(self._done, settings.rounds * len(settings.contestants) + long, text)
        self._done += 1


async def send(address: Address, model: str, load: Sequence[Arrival], deadline_s: float) -> list[Reply]:
    """Send every request when it is due, whatever became of those before; replies in the same order."""
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
        }
        left_s = started + deadline_s - time.perf_counter()
        try:
            return await asyncio.wait_for(ask(address, _ROUTE, body, asked_at=due), left_s)
        except asyncio.TimeoutError:
            return Reply(due, error=f"not answered in {deadline_s:g} s", ended_at=time.perf_counter())

    return list(await asyncio.gather(*map(one, load)))


# --- what it comes to ----------------------------------------------------------------------------


def summary(rounds: Sequence[Sequence[Reply]]) -> dict[str, Any]:
    """One server's numbers: throughput as the median of the rounds, times over all requests."""
    replies = [reply for replies in rounds for reply in replies]
    answered = [reply for reply in replies if reply.is_answered]
    walls = [max(each.ended_at for each in one) - min(each.asked_at for each in one) for one in rounds]
    tokens = [sum(reply.completion_tokens for reply in one if reply.is_answered) for one in rounds]
    counts = [sum(reply.is_answered for reply in one) for one in rounds]
    cached = [reply.cached_tokens for reply in answered]
    prompt_tokens = sum(int(reply.usage.get("prompt_tokens", 0)) for reply in answered)
    known = [tokens for tokens in cached if tokens is not None]
    return {
        "requests": len(replies),
        "answered": len(answered),
        "errors": sorted({_reason(reply) for reply in replies if not reply.is_answered}),
        "wall_s": _middle(walls),
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sum(tokens),
        "tokens_per_s": _middle([count / wall for count, wall in zip(tokens, walls, strict=True)]),
        "requests_per_s": _middle([count / wall for count, wall in zip(counts, walls, strict=True)], 3),
        "rounds_tokens_per_s": [round(count / wall, 2) for count, wall in zip(tokens, walls, strict=True)],
        "ttft_ms": percentiles([reply.ttft_s for reply in answered if reply.ttft_s is not None]),
        "gap_ms": percentiles([gap for reply in answered for _, gap in reply.gaps_s]),
        "cached_share": round(sum(known) / prompt_tokens, 3) if known and prompt_tokens else None,
    }


def long_summary(without: Sequence[Reply], beside: Sequence[Reply], long: Reply) -> dict[str, Any]:
    """Gaps between tokens of the steady requests while the long prompt is read, and then without it."""
    if long.ttft_s is None:
        raise ServerFailedError(f"the long prompt was not answered: {_reason(long)}")
    starts = [min(reply.asked_at for reply in replies) for replies in (without, beside)]
    arrived_s = long.asked_at - starts[1]
    gaps: list[dict[str, Any]] = []
    windows = []
    for replies, start in zip((without, beside), starts, strict=True):
        everything = [gap for reply in replies for gap in reply.gaps_s]
        first, last = start + arrived_s, start + arrived_s + long.ttft_s
        window = [gap for came, gap in everything if came >= first and came - gap <= last]
        windows.append(window)
        gaps.append({"all_ms": percentiles([gap for _, gap in everything]), "then_ms": percentiles(window)})
    ratio = None
    if all(windows):
        ratio = round(gaps[1]["then_ms"]["p99"] / gaps[0]["then_ms"]["p99"], 3)
    return {
        "long_prompt_tokens": int(long.usage.get("prompt_tokens", 0)),
        "long_ttft_ms": round(long.ttft_s * 1e3, 1),
        "requests": len(without),
        "unanswered": sum(not reply.is_answered for reply in (*without, *beside, long)),
        "without": gaps[0],
        "with": gaps[1],
        "gap_p99_ratio": ratio,
    }


def targets(servers: dict[str, dict[str, Any]], long: dict[str, Any] | None) -> list[dict[str, Any]]:
    """What was to be reached, what was, and whether that is enough; only what was measured."""
    found = []
    for name, least in LEAST_OVER.items():
        if KVBOOST in servers and name in servers and servers[name]["tokens_per_s"]:
            value = servers[KVBOOST]["tokens_per_s"] / servers[name]["tokens_per_s"]
            label = f"tokens/s: kvboost / {name}"
            found.append({"name": label, "value": round(value, 3), "at_least": least, "met": value >= least})
    if long is not None and long["gap_p99_ratio"] is not None:
        value = long["gap_p99_ratio"]
        label = "p99 of gaps: with a long prompt / without"
        found.append({"name": label, "value": value, "at_most": MAX_GAP_RATIO, "met": value <= MAX_GAP_RATIO})
    return found


def percentiles(seconds: Sequence[float]) -> dict[str, Any] | None:
    """Milliseconds at p50, p95 and p99, and the highest; None of nothing."""
    if not seconds:
        return None
    values = sorted(value * 1e3 for value in seconds)
    cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else values * 99
    return {
        "p50": round(cuts[49], 1),
        "p95": round(cuts[94], 1),
        "p99": round(cuts[98], 1),
        "high": round(values[-1], 1),
        "count": len(values),
    }


def _compare_texts(servers: dict[str, dict[str, Any]], rounds: dict[str, list[list[Reply]]]) -> None:
    """How many answers equal those of the server without batching."""
    reference = rounds.get(ALONE, [])
    for name, found in servers.items():
        pairs = [
            (reply.text, other.text)
            for one, others in zip(rounds[name], reference, strict=False)
            for reply, other in zip(one, others, strict=True)
            if reply.is_answered and other.is_answered
        ]
        found["same_text_as_no_batching"] = sum(ours == theirs for ours, theirs in pairs)
        found["compared"] = len(pairs)


def _middle(values: Sequence[float], digits: int = 2) -> float:
    return round(statistics.median(values), digits)


def _reason(reply: Reply) -> str:
    """Why a request was not answered."""
    if reply.error is not None:
        return reply.error
    if reply.status != 200:
        return f"status {reply.status}: {reply.body[:200].decode(errors='replace')}"
    return "the stream ended before the answer did"
