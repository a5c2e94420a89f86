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
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from kvboost.bench.record import machine_record
from kvboost.bench.serve_load import Arrival, ServeSettings, Workload, send
from kvboost.bench.serve_numbers import (
    LEAST_OVER,
    compare_texts,
    differences,
    least_over_rag,
    long_summary,
    summary,
    targets,
    why_unanswered,
)
from kvboost.bench.serve_servers import (
    HTTP_PEER,
    KVBOOST,
    LABELS,
    Contestant,
    ServerFailedError,
    ServerProcess,
    contestants,
    reason_not_there,
    tokenizer_of,
)
from kvboost.bench.stream_client import Address, Reply, ask

Report = Callable[[int, int, str], None]  # steps done, steps in all, what is being done

_START_S = 180.0
_LONG_NEW_TOKENS = 8
_STEADY_SEED = 1_000
_WARM_UP = ("The first request pays for", "fresh memory, and so does", "the first batch of several.")


def run(
    model: str,
    settings: ServeSettings,
    peers_folder: Path,
    report: Report = lambda _done, _total, _text: None,
) -> dict[str, Any]:
    """Measure and return the record."""
    machine = machine_record(torch.device(settings.device))
    bench = _Bench(model, settings, peers_folder, report)
    rounds = asyncio.run(bench.run())
    servers = {name: summary(rounds[name]) for name in settings.contestants if rounds[name]}
    compare_texts(servers, rounds)
    least = least_over_rag(settings.new_tokens) if settings.documents else LEAST_OVER
    return {
        "benchmark": f"serve-rag-{settings.new_tokens}" if settings.documents else "serve",
        "model": model,
        "dtype": settings.dtype,
        "machine": machine,
        "settings": dataclasses.asdict(settings),
        "servers": {
            name: {"label": LABELS[name], **bench.about.get(name, {}), **found}
            for name, found in servers.items()
        },
        "unavailable": bench.unavailable,
        "long_prompt": bench.long_prompt,
        "targets": targets(servers, bench.long_prompt, least),
        **({"differences": differences(rounds)} if settings.documents else {}),
    }


class _Bench:
    """All servers in turns, and how far it is."""

    def __init__(self, model: str, settings: ServeSettings, peers_folder: Path, report: Report) -> None:
        self._settings = settings
        self._report = report
        self._peer = peers_folder / HTTP_PEER
        self._model = model
        self._there = contestants(model, settings.device, settings.dtype, settings.serve_flags, self._peer)
        self._workload = Workload(tokenizer_of(model), settings)
        self._done = 0
        self.about: dict[str, dict[str, Any]] = {}
        self.unavailable: list[dict[str, str]] = []
        self.long_prompt: dict[str, Any] | None = None

    async def run(self) -> dict[str, list[list[Reply]]]:
        """The replies of every server, round by round."""
        settings = self._settings
        found: dict[str, list[list[Reply]]] = {name: [] for name in settings.contestants}
        order = [name for name in settings.contestants if self._is_there(name)]
        shape = (settings.requests, settings.rate, settings.new_tokens)
        for number in range(settings.rounds):
            documents = self._workload.documents(number)
            if documents:
                load = self._workload.rag_load(documents, *shape, seed=number)
            else:
                load = self._workload.load(self._workload.beginnings(number), *shape, seed=number)
            first = number % len(order) if order else 0
            for name in order[first:] + order[:first]:
                self._step(f"round {number + 1} of {settings.rounds}: {LABELS[name].strip()}")
                with self._dropping(name):
                    found[name].append(await self._measure(self._there[name], load, documents))
        if settings.long_tokens and KVBOOST in order:
            with self._dropping(KVBOOST):
                await self._measure_long(self._there[KVBOOST])
        return found

    def _is_there(self, name: str) -> bool:
        if name in self._there:
            return True
        self._drop(name, reason_not_there(self._peer, self._model) or "it is no server: run make peers")
        return False

    async def _measure(
        self, contestant: Contestant, load: Sequence[Arrival], documents: Sequence[str]
    ) -> list[Reply]:
        """A fresh server that has read the documents, under one load."""
        async with self._started(contestant) as address:
            await self._warm(address, documents)
            replies = await self._send(address, contestant, load)
            if documents:  # again, and not timed: log-probabilities show later where answers part
                again = await self._send(address, contestant, load, logprobs=2)
                for reply, same in zip(replies, again, strict=True):
                    reply.tokens = same.tokens if same.text == reply.text else []
            return replies

    async def _send(
        self, address: Address, contestant: Contestant, load: Sequence[Arrival], **fields: Any
    ) -> list[Reply]:
        if self._settings.documents:
            fields["mode"] = "chunk_kv_reuse"
        return await send(address, contestant.model, load, self._settings.deadline_s, fields)

    @staticmethod
    async def _warm(address: Address, documents: Sequence[str]) -> None:
        for document in documents:
            reply = await ask(address, "/v1/cache/warm", {"prompt": document})
            if reply.status != 200:
                raise ServerFailedError(f"a document was not read: {why_unanswered(reply)}")

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
            await self._send(address, contestant, first)
            load = workload.load(beginnings, *shape, seed=_STEADY_SEED)
            without = await self._send(address, contestant, load)
            self._step("the same with a long prompt")
            load = workload.load(beginnings, *shape, seed=_STEADY_SEED)
            at_s = load[len(load) // 4].at_s
            long = Arrival(at_s, await self._long_prompt(address), _LONG_NEW_TOKENS)
            both = await self._send(address, contestant, [*load, long])
        self.long_prompt = long_summary(without, both[:-1], both[-1])

    async def _long_prompt(self, address: Address) -> str:
        """A text that is new, or documents that the server has read, in another order."""
        settings, workload = self._settings, self._workload
        if not settings.documents:
            return workload.long(settings.long_tokens)
        documents = workload.documents(_STEADY_SEED, settings.long_tokens)
        await self._warm(address, documents)
        return workload.reordered(documents, random.Random(settings.seed))

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
                    raise ServerFailedError(f"the first requests: {why_unanswered(reply)}")
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
