"""Redis and S3 servers, and engines that share them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvboost import KVBoost
from kvboost.remote import cache
from tests.fixture_types import MakeEngine
from tests.remote.servers import AWS, RedisCluster, RedisServer, S3Server, need_redis, need_s3
from tests.threads import one_torch_thread
from tests.tiny_models import long_model

StartRedis = Callable[..., RedisServer]


@pytest.fixture(scope="module")
def start_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartRedis]:
    """Starts redis-server with lines of its configuration."""
    need_redis()
    servers: list[RedisServer] = []

    def start(*options: str, **more: Any) -> RedisServer:
        servers.append(RedisServer(tmp_path_factory.mktemp("r"), *options, **more))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


@pytest.fixture(scope="module")
def shared_redis(start_redis: StartRedis) -> RedisServer:
    return start_redis()


@pytest.fixture
def redis_server(shared_redis: RedisServer) -> RedisServer:
    """A server that is empty."""
    with shared_redis.client() as client:
        client.flushall()
    return shared_redis


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    need_redis()
    made = RedisCluster(tmp_path_factory.mktemp("c"))
    yield made
    made.kill()


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    need_s3()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in AWS.items():
            patch.setenv(name, value)
        server = S3Server(tmp_path_factory.mktemp("s3"))
        yield server
        server.kill()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests wait for the store: computing a tiny model's prompts takes less time than asking for them."""
    monkeypatch.setattr(cache, "_LEAST_S", 10.0)


@pytest.fixture
def machine(tokenizer: Any) -> Iterator[MakeEngine]:
    """Engines that stand for machines: the same weights, nothing in common but the store that they are given.

    The integrity of every store is checked at the end.
    """
    engines: list[KVBoost] = []

    def make(address: str | None, **options: Any) -> KVBoost:
        model = options.pop("model", None) or long_model(**options.pop("model_options", {}))
        engine = KVBoost(model, tokenizer, remote_cache=address, **{"chunk_size": 32, **options})
        engines.append(engine)
        return engine

    with one_torch_thread():
        yield make
    for engine in engines:
        engine.cache_manager.check_integrity()
        engine.close()
