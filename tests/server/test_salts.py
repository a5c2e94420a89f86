"""Two tenants with salts of their own: neither sees the other's hits, nor in how long an answer takes."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from kvboost.bench.serve_servers import KVBOOST_COMMAND, ServerProcess
from kvboost.bench.stream_client import Address, ask
from kvboost.server.settings import ApiKey
from tests.equivalence.proofs import write_result
from tests.fixture_types import MakeEngine
from tests.server.running import MODEL, Running, Serve
from tests.tiny_models import random_ids

KEYS = (ApiKey("ann", "a"), ApiKey("bob", "b"))
PROBES = 200
PROMPT_TOKENS = 48
RELABELLINGS = 4_000
CERTAINTY = 0.999


# --- hits ------------------------------------------------------------------------------------


def headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def cached(server: Running, key: str, prompt: list[int], **fields: Any) -> int:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
    response = server.client.post("/v1/completions", json=body, headers=headers(key))
    assert response.status_code == 200, response.text
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def text(number: int, tokens: int = 64) -> list[int]:
    """Texts with different numbers share not even the first token."""
    return [6 + number, *random_ids(tokens - 1, number)]


@pytest.mark.parametrize("mode", ["prefix_cache", "chunk_kv_reuse"])
@pytest.mark.parametrize("batching", [True, False])
def test_tenants_do_not_see_each_others_hits(
    make_engine: MakeEngine, serve: Serve, batching: bool, mode: str
) -> None:
    """Texts that are read by both in turns, whole, continued, and behind something else."""
    server = serve(make_engine(), api_keys=KEYS, batching=batching, mode=mode)
    for number in range(8):
        first, second = ("ann", "bob") if number % 2 else ("bob", "ann")
        prompt = text(number)
        assert cached(server, first, prompt) == 0
        assert cached(server, second, prompt) == 0
        assert cached(server, first, prompt) == cached(server, second, prompt) == 63
        only_first = text(20 + number)
        cached(server, first, only_first)
        assert cached(server, second, only_first + text(40 + number, 5)) == 0
        assert cached(server, second, text(60 + number, 7) + only_first) == 0
        other_salt = {"cache_salt": "x"}
        assert cached(server, first, only_first, **other_salt) == 0


def test_a_text_that_another_tenant_is_reading_is_not_shared(
    make_slow_engine: MakeEngine, serve: Serve
) -> None:
    """While it lies in the running batch for one, the other computes it by itself."""
    server = serve(make_slow_engine(0.02), api_keys=KEYS)
    prompt = random_ids(80, 1)
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 60, "temperature": 0}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.client.post, "/v1/completions", json=body, headers=headers("ann"))
        server.until(lambda stats: stats["running"] == 1)
        with httpx.Client(base_url=server.url, timeout=60) as other:
            reply = other.post("/v1/completions", json={**body, "max_tokens": 2}, headers=headers("bob"))
            again = other.post("/v1/completions", json={**body, "max_tokens": 2}, headers=headers("ann"))
            assert not answer.done(), "ann's first request is still in the batch"
        assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) - 1
        assert answer.result().status_code == 200


# --- time ------------------------------------------------------------------------------------


@dataclass
class Probe:
    """How long a tenant waited for one token, and what was found."""

    kind: str
    ms: float
    cached_tokens: int


def noise(one: Sequence[float], other: Sequence[float], seed: int = 0) -> float:
    """How far apart the medians of two groups come out when only chance decides who is in which."""
    draw = random.Random(seed)
    pooled = [*one, *other]
    found = []
    for _ in range(RELABELLINGS):
        draw.shuffle(pooled)
        halves = pooled[: len(one)], pooled[len(one) :]
        found.append(abs(statistics.median(halves[0]) - statistics.median(halves[1])))
    return sorted(found)[int(CERTAINTY * len(found))]


def test_the_measure_itself() -> None:
    """It sees a difference of a hundredth between groups like ours, and none where there is none."""
    draw = random.Random(3)
    same = [[draw.lognormvariate(0, 0.02) for _ in range(PROBES)] for _ in range(2)]
    bound = noise(*same)
    assert abs(statistics.median(same[0]) - statistics.median(same[1])) <= bound < 0.01
    shifted = [value - 0.01 for value in same[1]]
    assert abs(statistics.median(same[0]) - statistics.median(shifted)) > bound


async def probe(address: Address, key: str, kind: str, prompt: list[int]) -> Probe:
    body = {"model": "builtin", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    started = time.perf_counter()
    reply = await ask(address, "/v1/completions", body, headers=headers(key))
    ms = (time.perf_counter() - started) * 1e3
    assert reply.status == 200, reply.body
    usage = json.loads(reply.body)["usage"]
    return Probe(kind, round(ms, 3), usage["prompt_tokens_details"]["cached_tokens"])


async def probe_all(address: Address, probes: int) -> list[Probe]:
    """Bob asks for texts that Ann has just read, and for texts that nobody has, in random order.

    Every text is asked for once, so that Bob's own hits are in none of the groups; "own" is what a hit
    looks like: Ann's second request.
    """
    draw = random.Random(5)
    first_tokens = iter(range(1_000, 40_000))

    def text() -> list[int]:
        first = next(first_tokens)  # so that no two texts have anything in common
        return [first, *random_ids(PROMPT_TOKENS - 1, first, low=1_000, high=40_000)]

    for _ in range(20):
        await probe(address, "bob", "warm-up", text())
    found = []
    for _ in range(probes):
        read_by_ann = text()
        await probe(address, "ann", "first", read_by_ann)
        turns = [("bob", "read by ann", read_by_ann), ("bob", "fresh", text()), ("bob", "control", text())]
        draw.shuffle(turns)
        found += [await probe(address, *turn) for turn in turns]
        found.append(await probe(address, "ann", "own", read_by_ann))
    return found


def check_times(found: list[Probe]) -> dict[str, Any]:
    times = {kind: [one.ms for one in found if one.kind == kind] for kind in {one.kind for one in found}}
    medians = {kind: statistics.median(group) for kind, group in times.items()}
    bound = noise(times["fresh"], times["control"])
    difference = abs(medians["read by ann"] - medians["fresh"])
    assert all(one.cached_tokens == 0 for one in found if one.kind != "own")
    assert all(one.cached_tokens == PROMPT_TOKENS - 1 for one in found if one.kind == "own")
    assert difference <= bound, (medians, bound)
    assert medians["fresh"] - medians["own"] > 5 * bound, "a hit would have been seen"
    return {
        "probes_per_group": len(times["fresh"]),
        "prompt_tokens": PROMPT_TOKENS,
        "median_ms": {kind: round(value, 3) for kind, value in sorted(medians.items())},
        "difference_ms": round(difference, 3),
        "control_difference_ms": round(abs(medians["control"] - medians["fresh"]), 3),
        "noise_ms": round(bound, 3),
        "certainty": CERTAINTY,
        "hits_across_salts": 0,
    }


def measured(probes: int) -> list[Probe]:
    keys = [flag for key in KEYS for flag in ("--api-key", f"{key.key}:{key.salt}")]
    command = [*KVBOOST_COMMAND, "serve", "builtin", "--port", "{port}", "--max-chunks", "none", *keys]
    server = ServerProcess(command, ready_path="/ready", environment={"HF_HUB_OFFLINE": "1"})

    async def run() -> list[Probe]:
        await server.wait_until_ready(180.0)
        return await probe_all(server.address, probes)

    try:
        return asyncio.run(run())
    finally:
        server.stop()


@pytest.mark.slow
@pytest.mark.real_model
def test_tenants_do_not_see_each_others_hits_in_time() -> None:
    found = measured(PROBES)
    write_result("proof-salts", check_times(found), found)
