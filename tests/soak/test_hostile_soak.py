"""64 hostile clients, and one who asks short questions meanwhile: it hardly notices.

`make test-integrations` has half a minute of it, `make soak` ten (KVBOOST_SOAK_MINUTES sets another time; the
result is kept where it was at least ten).
"""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from kvboost.bench.serve_servers import KVBOOST_COMMAND, ServerProcess
from kvboost.bench.stream_client import ask
from tests.equivalence.proofs import write_result
from tests.soak.hostile_load import (
    FLOODER,
    HOSTILE_CLIENTS,
    VANDAL,
    VICTIM,
    look_around,
    short_requests,
    under_attack,
)

for needed in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(needed)

MINUTES = float(os.environ.get("KVBOOST_SOAK_MINUTES", "10"))
WHOLE_MINUTES = 10.0
MODEL, ADMIN = "hostile", "root"
SHORT_S = 40.0
SETTLE_S = 5.0  # until all of them are at it
ASKED, LEAST_ASKED = 20, 8
LAST_S = 4.0  # for the last one's answer
ATTACKS = 3
MEDIAN_TIMES, WORST_TIMES = 3.0, 6.0  # of its time alone plus one step
LOOK_S = 1.0
MAX_GROWTH = 0.05


@dataclass(frozen=True)
class Round:
    """First tokens of another tenant's short requests during a part of the attack."""

    step_ms: float
    median_ms: float
    worst_ms: float
    median_times: float  # of its time alone plus one step
    worst_times: float


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    command = [*KVBOOST_COMMAND, "serve", "builtin", "--served-model-name", MODEL, "--port", "{port}"]
    for key in (VICTIM, FLOODER, VANDAL):
        command += ["--api-key", f"{key}:{key}"]
    command += ["--admin-key", ADMIN, "--timeout", "20", "--max-chunks", "100"]
    process = ServerProcess(command, ready_path="/ready", environment={"HF_HUB_OFFLINE": "1"})
    yield process
    process.stop()


async def steps_of(server: ServerProcess) -> int:
    reply = await ask(server.address, "/v1/cache/stats", headers={"Authorization": f"Bearer {ADMIN}"})
    assert reply.status == 200
    steps: int = reply.json["batch"]["steps"]
    return steps


async def attacked(server: ServerProcess, seconds: float, rounds: int) -> dict[str, Any]:
    """Short requests alone, then among hostile clients, up to `ASKED` in each of `rounds`."""
    await server.wait_until_ready(180.0)
    await short_requests(server.address, MODEL, 3, 0.0, seed=999)
    alone = await short_requests(server.address, MODEL, ASKED, 0.05, seed=998)
    found: dict[str, Any] = {"alone": alone, "rounds": [], "steps_s": [], "rss_mb": []}
    over = asyncio.Event()
    with under_attack(server.address, MODEL, seconds) as counts:
        await asyncio.sleep(SETTLE_S)
        watching = asyncio.ensure_future(_watch(server, found["rss_mb"]))
        looking = asyncio.ensure_future(look_around(server.address, ADMIN, over.is_set))
        loop = asyncio.get_running_loop()
        ends = loop.time() + seconds - SETTLE_S
        span_s = (seconds - SETTLE_S - 2) / rounds
        for number in range(rounds):
            started, steps = loop.time(), await steps_of(server)
            pause_s = max(0.01, min(0.5, span_s / ASKED / 4))
            last = started + span_s - LAST_S  # a slow machine asks fewer: all of them are asked under attack
            found["rounds"].append(await short_requests(server.address, MODEL, ASKED, pause_s, number, last))
            found["steps_s"].append((loop.time() - started) / max(1, await steps_of(server) - steps))
            found["left_s"] = ends - loop.time()
            await asyncio.sleep(max(0.0, started + span_s - loop.time()))
        over.set()
        watching.cancel()
        found["looks"] = await looking
        found["hostile"] = await asyncio.to_thread(counts)
    found["after"] = await short_requests(server.address, MODEL, 3, 0.0, seed=997)
    return found


async def _watch(server: ServerProcess, rss_mb: list[float]) -> None:
    while True:
        rss_mb.append(server.rss_bytes / 2**20)
        await asyncio.sleep(1.0)


def growth(rss_mb: list[float]) -> float:
    """How much more memory is held in the last quarter of the time than in the second, in the median.

    What is held goes up and down by a tenth, with what is being read and computed.
    """
    quarter = len(rss_mb) // 4
    second, last = rss_mb[quarter : 2 * quarter], rss_mb[-quarter:]
    return statistics.median(last) / statistics.median(second) - 1


def check(found: dict[str, Any], server: ServerProcess) -> dict[str, Any]:
    """What must hold on any machine: all are answered or refused, and nothing breaks. Returns the summary."""
    for replies in (found["alone"], *found["rounds"], found["after"]):
        assert [reply.status for reply in replies] == [200] * len(replies), replies
        assert all(reply.is_answered for reply in replies), replies
    alone_s = statistics.median(reply.ttft_s for reply in found["alone"])
    rounds = []
    for replies, step_s in zip(found["rounds"], found["steps_s"], strict=True):
        times = [reply.ttft_s for reply in replies]
        base_s, median_s = alone_s + step_s, statistics.median(times)
        milliseconds = [round(seconds * 1e3, 1) for seconds in (step_s, median_s, max(times))]
        rounds.append(Round(*milliseconds, round(median_s / base_s, 2), round(max(times) / base_s, 2)))
    rss = sorted(found["rss_mb"])
    summary = {
        "hostile_clients": HOSTILE_CLIENTS,
        "hostile": dict(sorted(found["hostile"].items())),
        "alone_ms": round(alone_s * 1e3, 1),
        "rounds": rounds,
        "longest_look_ms": {route: round(s * 1e3, 1) for route, s in found["looks"].items()},
        "rss_mb": {"least": round(rss[0]), "median": round(statistics.median(rss)), "most": round(rss[-1])},
    }
    assert sum(count for name, count in found["hostile"].items() if name.endswith(" 429")) > 0, summary
    assert sum(count for name, count in found["hostile"].items() if name.endswith(" 500")) == 0, summary
    assert "Traceback" not in server.log, server.log[server.log.index("Traceback") :][:3000]
    return summary


def check_times(found: dict[str, Any], summary: dict[str, Any]) -> None:
    """How little the others notice, on a machine that does nothing else."""
    assert found["left_s"] > 0, f"the attack was over before the last was answered: {summary}"
    assert min(len(replies) for replies in found["rounds"]) >= LEAST_ASKED, summary
    assert max(each.median_times for each in summary["rounds"]) <= MEDIAN_TIMES, summary
    assert max(each.worst_times for each in summary["rounds"]) <= WORST_TIMES, summary
    assert max(found["looks"].values()) <= LOOK_S, summary


@pytest.mark.integration
@pytest.mark.real_model
@pytest.mark.timed
def test_a_short_request_among_hostile_clients(server: ServerProcess) -> None:
    """Answers must be right in every attack; the times in one of three, for other work may slow one down."""
    for left in reversed(range(ATTACKS)):
        found = asyncio.run(attacked(server, SHORT_S, rounds=1))
        summary = check(found, server)
        assert summary["hostile"]["vanished"] > 0
        try:
            check_times(found, summary)
        except AssertionError:
            if not left:
                raise
        else:
            return


@pytest.mark.soak
@pytest.mark.real_model
def test_hostile_clients_for_ten_minutes(server: ServerProcess) -> None:
    found = asyncio.run(attacked(server, MINUTES * 60, max(4, round(MINUTES))))
    summary = check(found, server)
    check_times(found, summary)
    summary["rss_growth"] = round(growth(found["rss_mb"]), 4)
    assert summary["rss_growth"] <= MAX_GROWTH, summary
    if MINUTES >= WHOLE_MINUTES:
        rounds = summary.pop("rounds")
        write_result("soak-hostile", summary, rounds)


def test_growth() -> None:
    """A leak is found; going up and down is none."""
    up_and_down = [100.0 + 10 * (second % 7) for second in range(600)]
    leaking = [each + 0.05 * second for second, each in enumerate(up_and_down)]
    assert abs(growth(up_and_down)) < 0.01
    assert growth(leaking) > MAX_GROWTH
