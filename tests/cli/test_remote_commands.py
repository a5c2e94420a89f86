"""`kvboost remote stats|check|clear`: on a store in memory, and on a real Redis and S3."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvboost.remote import byte_store
from kvboost.remote.byte_store import DENIED, UNREACHABLE, StoreError
from kvboost.remote.inventory import StoredName, read_name
from kvboost.remote.keys import tenant_prefix
from tests.cli.command import kvboost
from tests.fixture_types import MakeEngine
from tests.remote.servers import AWS, RedisServer, S3Server, need_redis, need_s3
from tests.tiny_models import random_ids
from tests.unit.remote.memory_store import MemoryStore

ADDRESS = "redis://:secret@elsewhere:6379"
CHUNKS = 4
DAMAGED = 3


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    """What every address leads to."""
    made = MemoryStore()
    monkeypatch.setattr(byte_store, "open_store", lambda _address: made)
    monkeypatch.setattr("kvboost.parts.engine_parts.open_store", lambda _address: made)
    return made


@pytest.fixture
def filled(store: MemoryStore, make_engine: MakeEngine) -> MemoryStore:
    """A store with a text of two tenants: four records each, windows and tails."""
    for number, salt in enumerate(("alice", "bob")):
        with make_engine(remote_cache=ADDRESS, cache_salt=salt, chunk_size=32) as engine:
            engine.generate(random_ids(32 * CHUNKS, seed=number), max_new_tokens=1)
    return store


def asked(*arguments: str | Path, status: int = 0) -> Any:
    outcome = kvboost("remote", *arguments, "--json")
    assert outcome.exit_code == status, outcome.output
    return json.loads(outcome.stdout)


def records_of(store: MemoryStore, salt: str) -> list[str]:
    """Names of the parts 0 of a tenant."""
    return [name for name in store.values if name.startswith(tenant_prefix(salt)) and name.endswith(":0")]


def places_of(store: MemoryStore, salt: str) -> list[str]:
    named = {name: read_name(name) for name in store.values if name.startswith(tenant_prefix(salt))}
    return [name for name, stored in named.items() if stored is not None and stored.number is None]


def damage(store: MemoryStore, name: str) -> None:
    value = bytearray(store.values[name])
    value[-1] ^= 1
    store.values[name] = bytes(value)


def test_names_are_taken_apart() -> None:
    tenant, record = "a" * 32, "b" * 40
    name = f"kvb:1:{tenant}:{record}"
    assert read_name(name) == StoredName(tenant, name, None, False)
    assert read_name(f"{name}:12") == StoredName(tenant, name, 12, False)
    assert read_name(f"{name}:0:claim") == StoredName(tenant, name, 0, True)
    for other in ("kvb:ping", f"kvb:2:{tenant}:{record}", f"{name}:x", f"other:{name}"):
        assert read_name(other) is None


# --- stats ---------------------------------------------------------------------------------------


def test_stats_of_all_tenants(filled: MemoryStore) -> None:
    filled.values["another program's"] = b"..."
    found = asked("stats", ADDRESS)
    assert {one["tenant"] for one in found["tenants"]} == {
        tenant_prefix(salt).split(":")[2] for salt in ("alice", "bob")
    }
    for one in found["tenants"]:
        assert one["records"] == one["parts"] == CHUNKS
        assert one["places"] >= CHUNKS
    total = sum(len(value) for name, value in filled.values.items() if name.startswith("kvb:"))
    assert sum(one["bytes"] for one in found["tenants"]) == total
    assert "prefix" not in found


@pytest.mark.usefixtures("filled")
def test_stats_of_one_salt_give_its_prefix() -> None:
    found = asked("stats", ADDRESS, "--cache-salt", "alice")
    assert found["prefix"] == tenant_prefix("alice")
    assert len(found["tenants"]) == 1
    shown = kvboost("remote", "stats", ADDRESS, "--cache-salt", "alice").stdout
    assert tenant_prefix("alice") in shown
    assert "secret" not in shown


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"policy": "noeviction", "max_bytes": 10, "used_bytes": 1}, ["noeviction"]),
        ({"policy": "allkeys-lru", "max_bytes": 0, "used_bytes": 1}, ["maxmemory is 0"]),
        ({"policy": "noeviction", "max_bytes": 0, "used_bytes": 1}, ["noeviction", "maxmemory is 0"]),
        ({"policy": "allkeys-lru", "max_bytes": 10, "used_bytes": 1}, []),
    ],
)
def test_settings_that_do_not_fit_are_warned_about(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, about: dict[str, Any], words: list[str]
) -> None:
    monkeypatch.setattr(store, "about", lambda: about)
    found = asked("stats", ADDRESS)["warnings"]
    assert len(found) == len(words)
    assert all(word in text for word, text in zip(words, found, strict=True))
    outcome = kvboost("remote", "stats", ADDRESS)
    assert outcome.stderr.count("warning: ") == len(words)


def test_a_tenant_who_may_not_ask_about_the_store(
    filled: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied() -> dict[str, Any]:
        raise StoreError(DENIED, "no permission to run INFO")

    monkeypatch.setattr(filled, "about", denied)
    assert asked("stats", ADDRESS)["about"] == {}
    assert "not shown to this user" in kvboost("remote", "stats", ADDRESS).stdout


@pytest.mark.parametrize("command", [["stats"], ["check"], ["clear", "--yes"]])
def test_a_store_that_is_away_is_one_line(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    def away(_prefix: str) -> Iterator[tuple[str, int]]:
        raise StoreError(UNREACHABLE, "connection refused")

    monkeypatch.setattr(store, "names", away)
    outcome = kvboost("remote", *command, ADDRESS)
    assert outcome.exit_code == 1
    assert outcome.stderr == "error: not reachable: connection refused\n"
    assert store.is_closed


def test_an_address_that_is_none() -> None:
    outcome = kvboost("remote", "stats", "http://:secret@host")
    assert outcome.exit_code == 1
    assert "redis://" in outcome.stderr
    assert "secret" not in outcome.stderr
    assert outcome.stderr.count("\n") == 1


# --- check ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("filled")
def test_all_is_good() -> None:
    found = asked("check", ADDRESS)
    assert len(found) == 2
    for one in found:
        assert (one["good"], one["tokens"]) == (CHUNKS, 32 * CHUNKS)
        assert one["places"] >= CHUNKS
        assert not any(
            one[name] for name in ("damaged", "missing_parts", "writing", "lost_places", "deleted")
        )


def test_damage_is_counted_and_deleted_on_demand(filled: MemoryStore) -> None:
    first, second, third, _ = records_of(filled, "alice")
    damage(filled, first)
    filled.values[second] = filled.values[third]  # the value of another record
    before = dict(filled.values)
    (one,) = asked("check", ADDRESS, "--cache-salt", "alice", status=DAMAGED)
    assert (one["good"], one["damaged"], one["deleted"]) == (2, 2, 0)
    assert one["lost_places"] >= 2
    assert filled.values == before
    (one,) = asked("check", ADDRESS, "--cache-salt", "alice", "--delete", status=DAMAGED)
    assert one["deleted"] == 2 + one["lost_places"]
    assert first not in filled.values
    (one,) = asked("check", ADDRESS, "--cache-salt", "alice")
    assert (one["good"], one["damaged"], one["lost_places"]) == (2, 0, 0)
    assert len(records_of(filled, "bob")) == CHUNKS


def test_missing_parts_are_misses_and_no_damage(
    store: MemoryStore, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvboost.remote.parts.MAX_BODY", 16_384)
    with make_engine(remote_cache=ADDRESS, chunk_size=32) as engine:
        engine.generate(random_ids(32 * CHUNKS, seed=0), max_new_tokens=1)
    first, second, third, _ = records_of(store, "")
    del store.values[first]  # its other parts are left
    del store.values[second.removesuffix("0") + "1"]
    del store.values[third]
    store.values[f"{third}:claim"] = b""  # somebody is at it
    (one,) = asked("check", ADDRESS)
    assert (one["good"], one["damaged"], one["missing_parts"], one["writing"]) == (1, 0, 2, 1)
    asked("check", ADDRESS, "--delete")
    assert not [name for name in store.values if name.startswith((first[:-1], second[:-1]))]
    assert [name for name in store.values if name.startswith(third[:-1])]


def test_places_that_point_nowhere(filled: MemoryStore) -> None:
    for name in records_of(filled, "bob"):
        del filled.values[name]
    filled.values[places_of(filled, "alice")[0]] = b"no place"
    found = {one["tenant"]: one for one in asked("check", ADDRESS)}
    alice, bob = (found[tenant_prefix(salt).split(":")[2]] for salt in ("alice", "bob"))
    assert (alice["good"], alice["lost_places"]) == (CHUNKS, 1)
    assert bob["lost_places"] == bob["places"] > 0
    shown = kvboost("remote", "check", ADDRESS, "--delete").stdout
    assert f"{1 + bob['places']} names deleted" in shown
    assert not places_of(filled, "bob")


# --- clear ---------------------------------------------------------------------------------------


def test_clear_of_one_salt(filled: MemoryStore) -> None:
    found = asked("clear", ADDRESS, "--cache-salt", "alice", "--yes")
    assert found["records"] == CHUNKS
    assert not records_of(filled, "alice")
    assert not places_of(filled, "alice")
    assert len(records_of(filled, "bob")) == CHUNKS


def test_clear_asks_and_leaves_what_others_stored(filled: MemoryStore) -> None:
    filled.values["another program's"] = b"..."
    before = dict(filled.values)
    outcome = kvboost("remote", "clear", ADDRESS, answer="n\n")
    assert outcome.exit_code == 1
    assert filled.values == before
    outcome = kvboost("remote", "clear", ADDRESS, answer="y\n")
    assert outcome.exit_code == 0
    assert outcome.stdout.startswith(f"{2 * CHUNKS} records deleted")
    assert list(filled.values) == ["another program's"]


# --- real stores ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def redis_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    need_redis()
    server = RedisServer(tmp_path_factory.mktemp("r"))
    yield server.url
    server.kill()


@pytest.fixture(scope="module")
def s3_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    need_s3()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in AWS.items():
            patch.setenv(name, value)
        server = S3Server(tmp_path_factory.mktemp("s3"))
        yield server.url("some/prefix")
        server.kill()


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["redis_address", "s3_address"])
def test_real_stores(kind: str, request: pytest.FixtureRequest, make_engine: MakeEngine) -> None:
    address = request.getfixturevalue(kind)
    for salt in ("alice", "bob"):
        with make_engine(remote_cache=address, cache_salt=salt, chunk_size=32) as engine:
            engine.generate(random_ids(32 * CHUNKS, seed=0), max_new_tokens=1)
            assert engine.core.parts.remote is not None
            assert engine.core.parts.remote.flush()
    found = asked("stats", address)
    assert [one["records"] for one in found["tenants"]] == [CHUNKS, CHUNKS]
    assert len(found["warnings"]) == (2 if kind == "redis_address" else 0)
    assert [one["good"] for one in asked("check", address)] == [CHUNKS, CHUNKS]
    assert asked("clear", address, "--cache-salt", "alice", "--yes")["records"] == CHUNKS
    (left,) = asked("check", address)
    assert left["good"] == CHUNKS
    assert asked("clear", address, "--yes")["records"] == CHUNKS
    assert asked("stats", address)["tenants"] == []


@pytest.mark.integration
def test_the_documented_rule_of_access(redis_address: str, make_engine: MakeEngine) -> None:
    """A tenant with the rights of docs/remote.md reads and writes its own, and nothing of others."""
    import redis

    page = (Path(__file__).parents[2] / "docs" / "remote.md").read_text()
    (rule,) = [line for line in page.splitlines() if line.startswith("ACL SETUSER")]
    prefix = asked("stats", redis_address, "--cache-salt", "alice")["prefix"]
    words = rule.replace("PREFIX", prefix).split()
    with redis.Redis.from_url(redis_address) as admin:
        admin.execute_command(*words)
    login = redis_address.replace("://", f"://{words[2]}:{words[4].removeprefix('>')}@")
    for _ in range(2):
        with make_engine(remote_cache=login, cache_salt="alice", chunk_size=32) as engine:
            result = engine.generate(random_ids(32 * CHUNKS, seed=0), max_new_tokens=1, mode="prefix_cache")
            assert engine.core.parts.remote is not None
            engine.core.parts.remote.store.ping()  # after an outage, this is what is asked first
            assert engine.core.parts.remote.flush()
            counts = engine.cache_stats()["remote"]
            assert counts["state"] == "up", counts
    assert result.cached_tokens == 32 * CHUNKS - 1
    with make_engine(remote_cache=login, cache_salt="bob", chunk_size=32) as engine:
        engine.generate(random_ids(32 * CHUNKS, seed=0), max_new_tokens=1)
        assert engine.cache_stats()["remote"]["misses"] == {DENIED: 1}
    outcome = kvboost("remote", "stats", login)
    assert outcome.exit_code == 1
    assert outcome.stderr.startswith("error: access denied")
