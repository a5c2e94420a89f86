"""A shared store that is killed, hangs, is slow, full or lies: answers stay right and nobody waits for it.

`make soak` does the same 2,000 times (tests/soak/test_remote_soak.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvboost.remote import cache
from tests.fixture_types import MakeEngine
from tests.remote.faults import NAMES, fault_named
from tests.remote.machines import counts, eventually, remote_of, same_as_baseline, written
from tests.remote.proxy import Proxy
from tests.remote.servers import RedisCluster, RedisServer, S3Server
from tests.remote.traffic import Traffic
from tests.tiny_models import random_ids

pytestmark = pytest.mark.integration
RECOVERY_S = 5.0
SLACK_S = 1.0  # for the machine, which may be at other work
REQUESTS = 8


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[Proxy]:
    made = Proxy(redis_server.port)
    yield made
    made.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_and_its_end(name: str, redis_server: RedisServer, proxy: Proxy, machine: MakeEngine) -> None:
    """0 wrong, 0 failed, no later than without the store and its deadline, and soon as before."""
    fault = fault_named(name, redis_server, proxy)
    writer = machine(redis_server.url)
    engine = machine(proxy.url)
    traffic = Traffic(engine)
    traffic.fill(writer)
    assert traffic.some(engine, 4).cached_tokens, "it works"
    fault.begin()
    try:
        outcome = traffic.some(engine, REQUESTS)
    finally:
        fault.end()
    assert outcome.is_right, outcome
    assert outcome.slowest <= max(traffic.plain_s) + cache._LEAST_S + SLACK_S, (outcome, traffic.plain_s)
    if fault.loses:
        again = machine(redis_server.url)
        traffic.fill(again)
    took = traffic.until_reused(engine, RECOVERY_S + SLACK_S)
    assert took <= RECOVERY_S + SLACK_S
    after = traffic.some(engine, 4)
    assert after.is_right
    eventually(lambda: counts(engine)["state"] == "up", RECOVERY_S + SLACK_S)


def test_what_was_spoiled_is_counted(
    redis_server: RedisServer, proxy: Proxy, machine: MakeEngine, patient: None
) -> None:
    del patient
    writer, engine = machine(redis_server.url), machine(proxy.url)
    traffic = Traffic(engine)
    for how in ("flip", "truncate", "swap"):
        traffic.fill(writer)
        writer.clear()
        proxy.spoil = getattr(proxy, how)
        outcome = traffic.some(engine, 6)
        proxy.well_behaved()
        assert outcome.is_right, (how, outcome)
    assert proxy.spoiled > 20
    assert sum(counts(engine)["misses"].values()) > 3


def test_what_lies_spoiled_in_the_store(
    redis_server: RedisServer, machine: MakeEngine, patient: None
) -> None:
    """Every kind of damage in the values themselves; it goes, and what is right comes again."""
    del patient
    prompt = random_ids(500, seed=4)
    for how in (
        lambda value: value[:-1] + bytes([value[-1] ^ 1]),
        lambda value: value[: len(value) // 2],
        lambda _value: b"",
        lambda value: value + b"more",
        lambda value: b"\0" * len(value),
    ):
        writer = machine(redis_server.url)
        same_as_baseline(writer, prompt)
        written(writer)
        with redis_server.client() as client:
            for name, value in redis_server.values().items():
                client.set(name, how(value))
        reader = machine(redis_server.url)
        assert same_as_baseline(reader, prompt).cached_tokens == 0
        remote_of(reader).flush(10.0)
        with redis_server.client() as client:
            client.flushall()
    writer = machine(redis_server.url)
    same_as_baseline(writer, prompt)
    written(writer)
    values = redis_server.values()
    with redis_server.client() as client:
        for name, value in zip(values, [*list(values.values())[1:], *list(values.values())[:1]], strict=True):
            client.set(name, value)
    same_as_baseline(machine(redis_server.url), prompt)


def test_a_store_that_was_never_there(machine: MakeEngine, redis_server: RedisServer) -> None:
    """An engine starts without it, and uses it once it is there."""
    proxy = Proxy(redis_server.port)
    proxy.go_away()
    engine = machine(proxy.url)
    traffic = Traffic(engine, count=4)
    assert traffic.some(engine, 4).is_right
    assert counts(engine)["state"] != "up"
    traffic.fill(machine(redis_server.url))
    proxy.well_behaved()
    traffic.until_reused(engine, RECOVERY_S + SLACK_S)
    proxy.close()


def test_a_full_store_can_be_read(start_redis: Any, machine: MakeEngine, patient: None) -> None:
    del patient
    server = start_redis("maxmemory 6mb", "maxmemory-policy noeviction")
    engine = machine(server.url, max_chunks=None)
    prompts = [random_ids(900, seed=number) for number in range(8)]
    for prompt in prompts:
        same_as_baseline(engine, prompt)
        remote_of(engine).flush(10.0)
    assert counts(engine)["dropped"]["full"] > 0
    assert counts(engine)["state"] == "up"
    assert same_as_baseline(machine(server.url), prompts[0]).cached_tokens >= 896


def test_a_cluster_whose_slots_move(cluster: RedisCluster, machine: MakeEngine, patient: None) -> None:
    """While it is in use: the client learns of it from the answers."""
    del patient
    writer, reader = machine(cluster.url), machine(cluster.url)
    traffic = Traffic(writer, seed=3)
    traffic.fill(writer)
    assert traffic.some(reader, 3).cached_tokens
    names = [name for node in cluster.nodes for name in node.values()]
    assert cluster.move_slots(names[::3]) > 10
    outcome = traffic.some(reader, 10)
    assert outcome.is_right
    assert outcome.cached_tokens > 0
    eventually(lambda: counts(reader)["state"] == "up", RECOVERY_S)
    other = random_ids(400, seed=77)
    same_as_baseline(writer, other)
    written(writer)
    assert same_as_baseline(reader, other).cached_tokens == 399


def test_a_cluster_that_loses_a_node(tmp_path: Any, machine: MakeEngine, redis_server: RedisServer) -> None:
    del redis_server  # where there is none, this is skipped
    cluster = RedisCluster(tmp_path)
    try:
        engine = machine(cluster.url)
        traffic = Traffic(engine, seed=4)
        traffic.fill(engine)
        cluster.nodes[2].kill()
        outcome = traffic.some(engine, REQUESTS)
        assert outcome.is_right, outcome
        assert outcome.slowest <= max(traffic.plain_s) + cache._LEAST_S + SLACK_S
    finally:
        cluster.kill()


def test_an_s3_that_goes_away(tmp_path: Any, machine: MakeEngine, s3: S3Server) -> None:
    del s3  # its credentials are in the environment
    server = S3Server(tmp_path)
    engine = machine(server.url())
    traffic = Traffic(engine, count=4, seed=5)
    outcome = traffic.some(engine, 4)
    server.kill()
    traffic.some(engine, REQUESTS, outcome)
    assert outcome.is_right, outcome
    assert outcome.slowest <= max(traffic.plain_s) + cache._LEAST_S + SLACK_S
