"""Several processes, models and settings in one store: nobody gets what is not theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fixture_types import MakeEngine
from tests.remote.crowd import run_crowd
from tests.remote.machines import counts, same_as_baseline, written
from tests.remote.servers import RedisServer
from tests.server.conftest import MISSING
from tests.tiny_models import long_model, random_ids

pytestmark = pytest.mark.integration
SMALL = ("maxmemory 4mb", "maxmemory-policy allkeys-lru")


def check_crowd(found: list[dict[str, Any]], server: RedisServer) -> None:
    assert [each["wrong"] for each in found] == [0] * len(found), found
    assert [each["failed"] for each in found] == [[]] * len(found), found
    assert sum(each["remote"]["read_chunks"] for each in found) > 0
    assert sum(each["remote"]["written_chunks"] for each in found) > 0
    with server.client() as client:
        assert client.info("stats")["evicted_keys"] > 0, "the store was too large"


def test_four_processes_and_little_memory(start_redis: Any, tmp_path: Path) -> None:
    server = start_redis(*SMALL)
    check_crowd(run_crowd(server.url, 6.0, tmp_path), server)


KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"model_options": {"dtype": torch.bfloat16}},
    "other weights": {"model_options": {"seed": 5}},
    "another architecture": {"model_options": {"architecture": "qwen2"}},
    "8 bits": {"kv_cache_bits": 8},
    "4 bits": {"kv_cache_bits": 4},
    "bit-exact": {"bit_exact": True},
}


@pytest.mark.usefixtures("patient")
def test_kinds_in_one_store_never_serve_each_other(redis_server: RedisServer, machine: MakeEngine) -> None:
    """All read one text and write it; then each finds its own, and answers as it did."""
    prompt = random_ids(400, seed=1)
    expected = {}
    for name, options in KINDS.items():
        engine = machine(redis_server.url, **dict(options))
        first = engine.generate(prompt, max_new_tokens=4, mode="prefix_cache")
        assert first.cached_tokens == 0, f"{name} was served what another wrote"
        assert written(engine)["duplicate_chunks"] == 0
        again = engine.generate(prompt, max_new_tokens=4, mode="prefix_cache")
        expected[name] = list(again.token_ids)
    for name, options in KINDS.items():
        engine = machine(redis_server.url, **dict(options))
        result = engine.generate(prompt, max_new_tokens=4, mode="prefix_cache")
        assert result.cached_tokens >= 384, name
        assert list(result.token_ids) == expected[name], name


@pytest.mark.usefixtures("patient")
def test_adapters_and_changed_weights(redis_server: RedisServer, machine: MakeEngine) -> None:
    """Weights that are changed in place are another model from then on."""
    prompt = random_ids(400, seed=2)
    model = long_model()
    engine = machine(redis_server.url, model=model)
    same_as_baseline(engine, prompt)
    written(engine)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
    assert same_as_baseline(engine, prompt).cached_tokens == 0
    written(engine)
    fresh = machine(redis_server.url)
    assert same_as_baseline(fresh, prompt).cached_tokens == 399


@pytest.mark.usefixtures("patient")
@pytest.mark.skipif(bool(MISSING), reason=f"a server needs {', '.join(MISSING)}")
def test_a_server_reuses_what_another_engine_read(redis_server: RedisServer, machine: MakeEngine) -> None:
    from tests.server.running import running

    text = "A long report about rivers, bridges and the people who build them. " * 8
    reader = machine(redis_server.url)
    expected = reader.generate(text, max_new_tokens=6, mode="prefix_cache")
    written(reader)
    engine = machine(redis_server.url)
    with running(engine) as server:
        answer = server.complete(text, max_tokens=6, temperature=0)
        assert answer["choices"][0]["text"] == expected.output_text
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == expected.prompt_tokens - 1
        stats = server.stats()["cache"]["remote"]
        assert stats["read_chunks"] > 0
        assert stats["lookups"] == 1
        with running(machine(redis_server.url, cache_salt="another")) as other:
            answer = other.complete(text, max_tokens=6, temperature=0)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert counts(engine)["state"] == "up"


@pytest.mark.usefixtures("patient")
@pytest.mark.skipif(bool(MISSING), reason=f"a server needs {', '.join(MISSING)}")
def test_a_server_whose_store_dies(start_redis: Any, machine: MakeEngine) -> None:
    from tests.server.running import running

    server = start_redis()
    engine = machine(server.url)
    with running(engine) as served:
        for number in range(6):
            if number == 2:
                server.kill()
            text = f"Report number {number} about rivers and the bridges that cross them. " * 4
            answer = served.complete(text, max_tokens=4, temperature=0)
            expected = engine.generate(text, max_new_tokens=4, mode="baseline")
            assert answer["choices"][0]["text"] == expected.output_text
