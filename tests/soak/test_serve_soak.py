"""`kvboost serve` under mixed load for half an hour: it forgets no request, leaks nothing, and stays right.

KVBOOST_SOAK_MINUTES sets another time; the result is kept where it was at least the half hour.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from kvboost.bench.serve_servers import KVBOOST_COMMAND, ServerProcess
from kvboost.bench.stream_client import ask
from kvboost.cli.main import main
from tests.equivalence.proofs import write_result
from tests.soak.mixed_load import ADMIN, Limits, MixedLoad
from tests.texts import corpus
from tests.tiny_models import tiny_model, tiny_tokenizer

for needed in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(needed)

MINUTES = float(os.environ.get("KVBOOST_SOAK_MINUTES", "30"))
WHOLE_MINUTES = 30.0
CLIENTS = 12
WARM_UP = 0.25  # of the time
WINDOWS = 6  # that the rest is cut into
MAX_GROWTH = 0.05
SAMPLE_S = 2.0
SHOWN_EVERY = 15  # of the samples, in the result file; the summary is of them all
BUILTIN = Limits(document_characters=2_000, question_characters=300, new_tokens=12, crowd=60)
TINY = Limits(document_characters=300, question_characters=60, new_tokens=20, crowd=60)
Start = Callable[..., ServerProcess]


@dataclass
class Sample:
    """The server's process at one moment."""

    at_s: float
    rss_mb: float
    threads: int
    open_files: int


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `kvboost serve` with a cache that is far too small, in RAM and on disk."""
    servers = []

    def begin(model: str, *flags: str) -> ServerProcess:
        command = [*KVBOOST_COMMAND, "serve", model, "--served-model-name", "soak", "--port", "{port}"]
        command += ["--api-key", "ann:a", "--api-key", "bob:b", "--api-key", "eve", "--admin-key", ADMIN]
        command += [
            "--max-sequences",
            "6",
            "--max-waiting",
            "16",
            "--timeout",
            "30",
            "--max-request-bytes",
            "200KB",
        ]
        command += ["--max-chunks", "24", "--disk-cache-dir", str(tmp_path / "kv"), *flags]
        server = ServerProcess(command, ready_path="/ready", environment={"HF_HUB_OFFLINE": "1"})
        servers.append(server)
        return server

    yield begin
    for server in servers:
        server.stop()


async def watch(server: ServerProcess, samples: list[Sample], started: float) -> None:
    """Look at the process every now and then."""
    process = psutil.Process(server.pid)
    while True:
        samples.append(
            Sample(
                round(time.monotonic() - started, 1),
                round(process.memory_info().rss / 2**20, 1),
                process.num_threads(),
                process.num_fds(),
            )
        )
        await asyncio.sleep(SAMPLE_S)


def growth(samples: list[Sample], seconds: float) -> tuple[list[float], float]:
    """The most memory in each part of the time after the warm-up, and how much more than in the first."""
    begin = seconds * WARM_UP
    width = (seconds - begin) / WINDOWS
    highest = []
    for number in range(WINDOWS):
        start, end = begin + number * width, begin + (number + 1) * width
        highest.append(max(sample.rss_mb for sample in samples if start <= sample.at_s < end))
    return highest, max(highest) / highest[0] - 1


async def stats_of(server: ServerProcess) -> dict[str, Any]:
    reply = await ask(server.address, "/v1/cache/stats", headers={"Authorization": f"Bearer {ADMIN}"})
    assert reply.status == 200, reply.body
    found: dict[str, Any] = reply.json
    return found


async def until_idle(server: ServerProcess) -> dict[str, Any]:
    """Wait until nothing runs and nothing waits; requests whose clients have gone must not stay."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        stats = await stats_of(server)
        worker, batch = stats["worker"], stats["batch"]
        if worker["running"] == worker["waiting"] == batch["sequences"] == 0:
            return stats
        await asyncio.sleep(0.2)
    raise AssertionError(f"somebody is stuck: {stats['worker']}, {stats['batch']}")


async def soak(server: ServerProcess, limits: Limits, seconds: float) -> dict[str, Any]:
    await server.wait_until_ready(180.0)
    load = MixedLoad(server.address, "soak", [corpus()], limits)
    samples: list[Sample] = []
    await load.learn(6)
    started = time.monotonic()
    watching = asyncio.create_task(watch(server, samples, started))
    await load.run(CLIENTS, seconds)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    at_the_end = await until_idle(server)
    counts = load.counts
    for _ in range(6):  # and it still answers, and is still right
        await load.know()
    cleared = await ask(server.address, "/v1/cache/clear", b"", headers={"Authorization": f"Bearer {ADMIN}"})
    return {
        "counts": counts,
        "samples": samples,
        "stats": at_the_end,
        "cleared": cleared.json,
        "after_clear": await stats_of(server),
    }


def check(found: dict[str, Any], seconds: float) -> dict[str, Any]:
    """All that must hold; returns the summary."""
    counts, samples, worker = found["counts"], found["samples"], found["stats"]["worker"]
    highest, grown = growth(samples, seconds)
    threads, files = ([getattr(one, name) for one in samples] for name in ("threads", "open_files"))
    summary = {
        "minutes": round(seconds / 60, 1),
        "clients": CLIENTS,
        "requests": counts.asked,
        "statuses": {str(status): count for status, count in sorted(counts.statuses.items())},
        "actions": dict(sorted(counts.actions.items())),
        "clients_that_left": counts.left,
        "prompt_tokens": counts.prompt_tokens,
        "cached_tokens": counts.cached_tokens,
        "completion_tokens": counts.completion_tokens,
        "answers_compared": counts.compared,
        "wrong": counts.wrong,
        "worker": worker,
        "evicted_chunks": found["stats"]["cache"]["evicted_chunks"],
        "highest_rss_mb_by_window": highest,
        "rss_growth": round(grown, 4),
        "most_threads": max(threads),
        "most_open_files": max(files),
        "resident_tokens_after_clear": found["after_clear"]["batch"]["resident_tokens"],
    }
    assert counts.wrong == [], summary
    assert grown <= MAX_GROWTH, summary
    assert worker["failed"] == 0, summary
    assert worker["answered"] > 0, summary
    assert worker["cancelled"] > 0, "clients that left were noticed"
    assert counts.statuses[429] > 0, "the floods went past the queue"
    assert summary["evicted_chunks"] > 0, "the cache was too small"
    assert counts.compared > 0, summary
    assert found["cleared"] == {"chunks": 0}, "nothing is left in use or pinned"
    assert summary["resident_tokens_after_clear"] == 0, "all of the arena is free again"
    late = [one for one in samples if one.at_s > seconds * WARM_UP]
    assert max(one.threads for one in late) <= statistics.median(threads) + 45, summary  # of a thread pool
    assert late[-1].open_files <= files[0] + 60, summary
    return summary


def check_end(server: ServerProcess, folder: Path) -> None:
    server.signal(signal.SIGTERM)
    assert server.wait(60.0) == 0
    assert "Traceback" not in server.log, server.log[server.log.index("Traceback") :][:3000]
    done = CliRunner().invoke(main, ["disk", "check", str(folder), "--json"])
    assert done.exit_code == 0, done.output
    (report,) = json.loads(done.stdout)
    assert (report["corrupt"], report["problems"], report["writing"]) == ([], [], 0)


@pytest.mark.soak
@pytest.mark.real_model
def test_half_an_hour_of_mixed_load(start: Start, tmp_path: Path) -> None:
    seconds = MINUTES * 60
    server = start("builtin", "--disk-cache-bytes", "300000000")
    found = asyncio.run(soak(server, BUILTIN, seconds))
    summary = check(found, seconds)
    check_end(server, tmp_path / "kv")
    if MINUTES >= WHOLE_MINUTES:
        write_result("soak-serve", summary, found["samples"][::SHOWN_EVERY])


@pytest.mark.soak
def test_mixed_load_on_a_tiny_model(start: Start, tmp_path: Path) -> None:
    """A shorter time, but many times as many requests."""
    seconds = MINUTES * 10
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    server = start(str(tmp_path / "model"), "--chunk-size", "16", "--disk-cache-bytes", "4000000")
    found = asyncio.run(soak(server, TINY, seconds))
    check(found, seconds)
    check_end(server, tmp_path / "kv")


def test_growth() -> None:
    """A leak is found, a server that is full at the end of its warm-up is not one."""
    flat = [Sample(float(second), 100.0 + min(second, 200), 1, 1) for second in range(1_000)]
    leaking = [Sample(float(second), 100.0 + 0.05 * second, 1, 1) for second in range(1_000)]
    assert growth(flat, 1_000)[1] == 0
    assert growth(leaking, 1_000)[1] > MAX_GROWTH
    assert len(growth(flat, 1_000)[0]) == WINDOWS
