"""`bench disk`: what the disk tier costs over the disk itself, and what an answer from disk saves.

Reads and writes of the tier (checksums, index, syncing) are compared with plain ones of the same bytes into
fresh tensors and from them, taking turns; files are dropped from the page cache before they are read. The
time to the first token is that of an engine that was just opened on a folder another one has filled. Knows
no terminal.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from kvboost.bench.record import machine_record, spread
from kvboost.disk import serde
from kvboost.disk.serde import Record
from kvboost.disk.tier import SLOTS, DiskEntry, DiskTier
from kvboost.disk.tiers import slot_bytes_for
from kvboost.errors import KVBoostError

Report = Callable[[int, int, str], None]
OpenEngine = Callable[..., Any]
MIN_READ = 0.6
MIN_WRITE = 0.4
MIN_SPEEDUP = 10.0
_BATCH = 8  # chunks that are synced together, as the engine does
_QUESTION_TOKENS = 24


@dataclass(frozen=True)
class DiskSettings:
    """What is measured: `rounds` of everything over `tokens` tokens, BASELINE `plain_rounds` times."""

    tokens: int = 4_096
    rounds: int = 5
    plain_rounds: int = 2
    seed: int = 0


def run(
    engine: Any,
    model: str,
    settings: DiskSettings,
    open_engine: OpenEngine,
    folder: Path | None = None,
    report: Report = lambda _done, _total, _text: None,
) -> dict[str, Any]:
    """Measure in a new folder under `folder` (None = the system's), and return the record."""
    machine = machine_record(engine.model.get_input_embeddings().weight.device)
    steps = 1 + 2 * settings.rounds + settings.plain_rounds
    with tempfile.TemporaryDirectory(prefix="kvboost-bench-", dir=folder) as name:
        bench = _Bench(engine, settings, open_engine, Path(name))
        report(0, steps, "filling the folder")
        bench.fill()
        for number in range(settings.rounds):
            report(1 + number, steps, "reading and writing")
            bench.compare()
        for number in range(settings.rounds):
            report(1 + settings.rounds + number, steps, "first token from disk")
            bench.answer_from_disk()
        for number in range(settings.plain_rounds):
            report(1 + 2 * settings.rounds + number, steps, "first token of BASELINE")
            bench.answer_plainly()
        report(steps, steps, "done")
        results = bench.results()
    return {
        "benchmark": "disk",
        "model": model,
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "machine": machine,
        "settings": dataclasses.asdict(settings),
        "results": results,
        "targets": targets(results),
    }


class _Bench:
    def __init__(self, engine: Any, settings: DiskSettings, open_engine: OpenEngine, folder: Path) -> None:
        self._engine = engine
        self._settings = settings
        self._open_engine = open_engine
        self._folder = folder
        random = Random(settings.seed)
        vocabulary = engine.model.config.get_text_config(decoder=True).vocab_size
        self._random, self._vocabulary = random, vocabulary
        self._prefix = self._some_ids(settings.tokens)
        self._slot_bytes = slot_bytes_for(engine.codec, engine.chunk_size)
        self._chunks = -(-settings.tokens // engine.chunk_size)
        self._options = {
            "disk_cache_dir": str(folder / "cache"),
            "disk_cache_bytes": 2 * self._chunks * self._slot_bytes,
            "max_chunks": None,
        }
        self._seconds: dict[str, list[float]] = {}
        self._ttft: dict[str, list[float]] = {"disk": [], "baseline": []}
        self._same_first_token: list[bool] = []
        self._questions: list[list[int]] = []
        self._first_tokens: list[int] = []
        self._records: list[Record] = []

    def _some_ids(self, count: int) -> list[int]:
        return [self._random.randrange(self._vocabulary) for _ in range(count)]

    def fill(self) -> None:
        """Have an engine write the prefix to disk."""
        with self._open_engine(**self._options) as engine:
            engine.warm(self._prefix)
        with self._tier() as tier:
            if len(tier) < self._chunks:
                raise KVBoostError(f"only {len(tier)} of {self._chunks} chunks got to disk: {tier.stats()}")
            chunks = [tier.load(entry) for entry in tier.entries()]
        self._records = [serde.to_record(chunk) for chunk in chunks if chunk is not None]

    def _tier(self) -> DiskTier:
        (folder,) = (path for path in (self._folder / "cache").iterdir() if path.is_dir())
        return DiskTier.existing(folder)

    def compare(self) -> None:
        """One round of plain and of checked writes and reads."""
        plain = self._folder / "plain.bin"
        checked = self._folder / "checked"
        batches = [self._records[at : at + _BATCH] for at in range(0, len(self._records), _BATCH)]
        self._time("plain write", lambda: _plain_write(plain, batches))
        with DiskTier(checked, len(self._records), self._slot_bytes) as tier:
            tier.clear()
            self._time("write", lambda: [tier.write_records(batch) for batch in batches])
            _drop_from_page_cache(plain)
            self._time("plain read", lambda: _plain_read(plain, self._records))
            _drop_from_page_cache(checked / SLOTS)
            entries = tier.entries()
            self._time("read", lambda: _checked_read(tier, entries))
        plain.unlink()

    def _time(self, what: str, call: Callable[[], Any]) -> None:
        started = time.perf_counter()
        call()
        self._seconds.setdefault(what, []).append(time.perf_counter() - started)

    def answer_from_disk(self) -> None:
        """The first answer of an engine that was just opened."""
        (folder,) = (path for path in (self._folder / "cache").iterdir() if path.is_dir())
        _drop_from_page_cache(folder / SLOTS)
        question = self._some_ids(_QUESTION_TOKENS)
        with self._open_engine(**self._options) as engine:
            engine.generate(self._some_ids(_QUESTION_TOKENS), max_new_tokens=1)  # the first forward is slow
            result = engine.generate(self._prefix + question, max_new_tokens=1, mode="prefix_cache")
        if result.cached_tokens < self._settings.tokens:
            raise KVBoostError(
                f"only {result.cached_tokens} of {self._settings.tokens} tokens came from disk"
            )
        self._ttft["disk"].append(result.ttft_ms)
        self._questions.append(question)
        self._first_tokens.append(result.token_ids[0])

    def answer_plainly(self) -> None:
        """The same question without a cache."""
        number = len(self._ttft["baseline"]) % len(self._questions)
        prompt = self._prefix + self._questions[number]
        result = self._engine.generate(prompt, max_new_tokens=1, mode="baseline")
        self._ttft["baseline"].append(result.ttft_ms)
        self._same_first_token.append(result.token_ids[0] == self._first_tokens[number])

    def results(self) -> dict[str, Any]:
        size = sum(record.header.payload_bytes for record in self._records)
        speeds = {
            what.replace(" ", "_") + "_gb_s": round(size / statistics.median(seconds) / 1e9, 3)
            for what, seconds in self._seconds.items()
        }
        ratios = {
            kind: [a / b for a, b in zip(self._seconds[f"plain {kind}"], self._seconds[kind], strict=True)]
            for kind in ("read", "write")
        }
        ttft = {who: spread(times) for who, times in self._ttft.items()}
        return {
            "payload_bytes": size,
            "slot_bytes": self._slot_bytes,
            **speeds,
            "read_of_plain": round(statistics.median(ratios["read"]), 3),
            "write_of_plain": round(statistics.median(ratios["write"]), 3),
            "ttft_ms": ttft,
            "speedup": round(ttft["baseline"]["median"] / ttft["disk"]["median"], 2),
            "same_first_token": all(self._same_first_token),
        }


def _plain_write(path: Path, batches: Sequence[Sequence[Record]]) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, sum(r.header.payload_bytes for batch in batches for r in batch))
        for batch in batches:
            for record in batch:
                for part in record.payload:
                    view = memoryview(part)
                    while view:
                        view = view[os.write(fd, view) :]
            os.fdatasync(fd)
    finally:
        os.close(fd)


def _plain_read(path: Path, records: Sequence[Record]) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        for record in records:
            for part in record.payload:
                view = serde.buffer_of(torch.empty(part.nbytes, dtype=torch.uint8))
                while view:
                    view = view[os.readv(fd, [view]) :]
    finally:
        os.close(fd)


def _drop_from_page_cache(path: Path) -> None:
    """Have the system read `path` from the disk the next time, where it can be asked to."""
    fd = os.open(path, os.O_RDWR)
    try:
        os.fsync(fd)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _checked_read(tier: DiskTier, entries: Sequence[DiskEntry]) -> None:
    for entry in entries:
        if tier.load(entry) is None:
            raise KVBoostError("a chunk that was just written could not be read")


def targets(results: dict[str, Any]) -> list[dict[str, Any]]:
    """What was to be reached, what was, and whether that is enough."""
    limits = (
        ("read, of a plain read", results["read_of_plain"], MIN_READ),
        ("write, of a plain write", results["write_of_plain"], MIN_WRITE),
        ("first token from disk, times sooner than BASELINE", results["speedup"], MIN_SPEEDUP),
    )
    return [
        {"name": name, "value": value, "at_least": least, "met": value >= least}
        for name, value, least in limits
    ]
