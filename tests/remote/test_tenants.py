"""Tenants of one store: salts keep them apart, and rules of access on the server do too."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvboost.remote import fingerprints
from kvboost.remote.keys import RemoteKeys, part, tenant_prefix
from kvboost.remote.lookup import chain_digests
from tests.fixture_types import MakeEngine
from tests.remote.machines import counts, eventually, remote_of, same_as_baseline, written
from tests.remote.servers import HOST, RedisServer, S3Server
from tests.tiny_models import random_ids

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("patient")]
PROMPT = random_ids(500, seed=1)


def all_names(engine: Any, prompt: list[int], salt: str) -> set[str]:
    """Every name that an engine would ask for or write for a prompt under a salt."""
    import numpy as np

    parts, remote = engine.core.parts, remote_of(engine)
    namespace = parts.fit.namespace(salt)
    keys = RemoteKeys.of(namespace, parts.codec.form)
    ids = np.array(prompt, dtype=np.uint32)
    digests = chain_digests(ids, parts.writer.cuts(ids), namespace.key)
    windows = fingerprints.sample(ids, remote.store.sample_every)
    names = {part(keys.record(digest), 0) for digest in digests}
    names |= {keys.tail(digest) for digest in (namespace.key, *digests)}
    return names | {keys.window(value) for _, value in windows}


@pytest.mark.parametrize("kind", ["redis", "s3"])
def test_zero_hits_across_salts(
    kind: str, request: pytest.FixtureRequest, machine: MakeEngine, approximate_reuse: list[Any]
) -> None:
    """By prefix and by content, in both directions; the same salt on another machine hits."""
    server = request.getfixturevalue("redis_server" if kind == "redis" else "s3")
    address = server.url if kind == "redis" else server.url("tenants")
    others = {"ann": "bob", "bob": "ann"}
    readers = {}
    for salt, other in others.items():
        engine = machine(address, cache_salt=salt)
        text = random_ids(500, seed=len(readers) + 1)
        same_as_baseline(engine, text)
        written(engine)
        readers[other] = machine(address, cache_salt=other, remote_write="reused")
        for prompt in (text, [*random_ids(40, seed=9), *text]):
            assert readers[other].generate(prompt, max_new_tokens=2, recompute_ratio=0.2).cached_tokens == 0
            readers[other].clear()
    assert [counts(engine)["read_chunks"] for engine in readers.values()] == [0, 0]
    assert same_as_baseline(machine(address, cache_salt="ann"), PROMPT).cached_tokens == 499
    again = machine(address, cache_salt="ann")
    assert again.generate(
        [*random_ids(40, seed=9), *PROMPT], max_new_tokens=2, recompute_ratio=0.2
    ).cached_tokens
    assert approximate_reuse


def test_salts_of_single_requests(redis_server: RedisServer, machine: MakeEngine) -> None:
    engine = machine(redis_server.url)
    same_as_baseline(engine, PROMPT, cache_salt="ann")
    written(engine)
    other = machine(redis_server.url)
    for salt in (None, "bob", "ann ", "ann\0"):
        assert same_as_baseline(other, PROMPT, cache_salt=salt).cached_tokens == 0
    assert same_as_baseline(other, PROMPT, cache_salt="ann").cached_tokens == 499


@pytest.mark.parametrize("kind", ["redis", "s3"])
def test_who_knows_all_but_the_salt_can_name_nothing(
    kind: str, request: pytest.FixtureRequest, machine: MakeEngine
) -> None:
    """With the weights, the tokens and this code: no name of theirs is one that the store has."""
    server = request.getfixturevalue("redis_server" if kind == "redis" else "s3")
    address = server.url if kind == "redis" else server.url("unguessed")
    engine = machine(address, cache_salt="a secret that nobody has told")
    same_as_baseline(engine, PROMPT)
    written(engine)
    store = remote_of(engine).store
    held = {name for name, _ in store.names("kvb:")}
    assert held >= all_names(engine, PROMPT, "a secret that nobody has told") & held
    assert all_names(engine, PROMPT, "a secret that nobody has told") & held, "with the salt they are found"
    draw = random.Random(1)
    guesses = ["", "salt", "kvboost", "a secret", *(f"{draw.random()}" for _ in range(200))]
    for guess in guesses:
        assert not all_names(engine, PROMPT, guess) & held
        assert not any(name.startswith(tenant_prefix(guess)) for name in held)
    family = engine.core.parts.fit.family
    values = [bytes(value) for value in store.read(sorted(held)) if value is not None]
    assert values
    for name in held:
        assert family not in name
    for word in (b"a secret that", family.encode()):
        assert not any(word in value for value in values)


def acl(server: RedisServer, user: str, salt: str) -> str:
    """An address with a user who may see one tenant's names only."""
    with server.client() as client:
        rules = ("on", f">{user}-word", f"~{tenant_prefix(salt)}*", "+@read", "+@write", "+@connection")
        client.execute_command("ACL", "SETUSER", user, "reset", *rules)
    return f"redis://{user}:{user}-word@{HOST}:{server.port}"


def test_users_who_see_their_own_tenant_only(redis_server: RedisServer, machine: MakeEngine) -> None:
    addresses = {salt: acl(redis_server, salt, salt) for salt in ("ann", "bob")}
    for salt, address in addresses.items():
        first = machine(address, cache_salt=salt)
        same_as_baseline(first, PROMPT)
        assert written(first)["written_chunks"] == 16
        assert same_as_baseline(machine(address, cache_salt=salt), PROMPT).cached_tokens == 499
    thief = machine(addresses["bob"], cache_salt="ann")  # knows the salt, too
    assert same_as_baseline(thief, PROMPT).cached_tokens == 0
    assert counts(thief)["state"] == "access denied"
    store = remote_of(thief).store
    with redis_server.client() as client:
        theirs = [name.decode() for name in client.scan_iter(match=f"{tenant_prefix('ann')}*")]
    assert theirs
    from kvboost.remote.byte_store import StoreError

    for call in (store.read, store.delete, store.claim):
        with pytest.raises(StoreError, match="access denied"):
            call(theirs[:1])
    with redis_server.client() as client:
        client.execute_command("ACL", "DELUSER", "ann", "bob")


def test_such_a_user_sees_the_store_come_back(start_redis: Any, machine: MakeEngine) -> None:
    server = start_redis()
    engine = machine(acl(server, "ann", "ann"), cache_salt="ann")
    same_as_baseline(engine, PROMPT)
    written(engine)
    server.kill()
    same_as_baseline(engine, random_ids(300, seed=5))
    assert counts(engine)["state"] == "not reachable"
    server.start()
    acl(server, "ann", "ann")
    eventually(lambda: counts(engine)["state"] == "up", 8.0)


def test_an_s3_prefix_for_each(s3: S3Server, machine: MakeEngine) -> None:
    first = machine(s3.url("team-a"))
    same_as_baseline(first, PROMPT)
    written(first)
    assert same_as_baseline(machine(s3.url("team-b")), PROMPT).cached_tokens == 0
    assert same_as_baseline(machine(s3.url("team-a")), PROMPT).cached_tokens == 499
