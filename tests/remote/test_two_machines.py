"""What one machine has read, another answers from: over Redis of every kind, and over S3."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvboost import KVBoost
from kvboost.loading.embedded import checkpoint_folder
from tests.fixture_types import MakeEngine
from tests.remote.machines import counts, same_as_baseline, written
from tests.remote.servers import RedisCluster, RedisServer, S3Server, certificates, environment
from tests.tiny_models import long_model, random_ids, tiny_tokenizer

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
PROMPT = random_ids(700, seed=1)


def check_reads_from(address: str, machine: MakeEngine, **options: Any) -> tuple[KVBoost, KVBoost]:
    """A reads, B answers from the store; returns both."""
    first = machine(address, **options)
    assert same_as_baseline(first, PROMPT).cached_tokens == 0
    assert written(first)["written_chunks"] == 22
    second = machine(address, **options)
    result = same_as_baseline(second, PROMPT)
    assert result.cached_tokens == 699
    assert result.spans[0].reason.startswith("remote, ")
    assert counts(second)["read_tokens"] == 704 - 1, "the answer's last token has no KV"
    assert counts(second)["misses"] == {}
    return first, second


# --- every kind of server --------------------------------------------------------------------------


@pytest.mark.usefixtures("patient")
def test_redis_in_one_look_up(redis_server: RedisServer, machine: MakeEngine) -> None:
    _, second = check_reads_from(redis_server.url, machine)
    found = counts(second)
    assert found["lookups"] == 1
    assert found["round_trips"] == 1 + found["read_chunks"], "one for all, and one for each record"
    again = counts(second)["round_trips"]
    assert same_as_baseline(second, PROMPT).cached_tokens == 699
    assert counts(second)["round_trips"] == again, "what is here is not asked for"


@pytest.mark.usefixtures("patient")
def test_a_prompt_nobody_has_read_costs_one_round_trip(
    redis_server: RedisServer, machine: MakeEngine
) -> None:
    engine = machine(redis_server.url, remote_write="reused")
    for length in (40, 300, 1500):
        before = counts(engine)["round_trips"]
        same_as_baseline(engine, random_ids(length, seed=length))
        assert counts(engine)["round_trips"] == before + 1
    assert counts(engine)["misses"] == {"never stored": 3}
    before = counts(engine)["round_trips"]
    same_as_baseline(engine, random_ids(20, seed=9))
    assert counts(engine)["round_trips"] == before, "too short to be worth a question"


@pytest.mark.usefixtures("patient")
def test_a_password(start_redis: Any, machine: MakeEngine) -> None:
    server = start_redis(password="open-sesame")
    first, second = check_reads_from(server.url, machine)
    for engine in (first, second):
        assert "open-sesame" not in json.dumps(engine.cache_stats())
    wrong = machine(server.url.replace("open-sesame", "wrong-word"))
    same_as_baseline(wrong, PROMPT)
    assert counts(wrong)["state"] == "access denied"
    assert counts(wrong)["misses"] == {"access denied": 1}


@pytest.mark.usefixtures("patient")
def test_a_unix_socket(redis_server: RedisServer, machine: MakeEngine) -> None:
    check_reads_from(redis_server.socket_url, machine)


@pytest.mark.usefixtures("patient")
def test_tls(start_redis: Any, machine: MakeEngine, tmp_path: Path) -> None:
    server = start_redis(tls=certificates(tmp_path))
    check_reads_from(server.url, machine)
    unknown = machine(server.url.partition("?")[0])  # nobody vouches for its certificate
    same_as_baseline(unknown, PROMPT)
    assert counts(unknown)["state"] == "not reachable"


@pytest.mark.usefixtures("patient")
def test_a_cluster(cluster: RedisCluster, machine: MakeEngine) -> None:
    _, second = check_reads_from(cluster.url, machine)
    assert counts(second)["lookups"] == 1
    held = [node.values() for node in cluster.nodes]
    assert all(held), "every node has a part of it"


@pytest.mark.usefixtures("patient")
def test_s3_in_one_level_of_requests(s3: S3Server, machine: MakeEngine) -> None:
    _, second = check_reads_from(s3.url("one/two"), machine)
    found = counts(second)
    assert found["round_trips"] == 1 + found["read_chunks"]
    assert same_as_baseline(machine(s3.url("other")), PROMPT).cached_tokens == 0


@pytest.mark.usefixtures("patient")
def test_a_bucket_that_is_not_there(s3: S3Server, machine: MakeEngine) -> None:
    engine = machine(s3.url().replace(s3.bucket, "no-such-bucket"))
    same_as_baseline(engine, PROMPT)
    engine.core.parts.remote.flush(10.0)
    assert counts(engine)["written_chunks"] == 0, counts(engine)


# --- with what else an engine can do ---------------------------------------------------------------


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    "options",
    [{"kv_cache_bits": 8}, {"kv_cache_bits": 4}, {"bit_exact": True}, {"chunk_boundary_window": 8}],
    ids=lambda options: next(iter(options)) + str(next(iter(options.values()))),
)
def test_with_options(redis_server: RedisServer, machine: MakeEngine, options: dict[str, Any]) -> None:
    """What B answers from the store is what A answers from its RAM."""
    first = machine(redis_server.url, **options)
    first.warm(PROMPT)
    expected = first.generate(PROMPT, max_new_tokens=4, mode="prefix_cache")
    written(first)
    second = machine(redis_server.url, **options)
    result = second.generate(PROMPT, max_new_tokens=4, mode="prefix_cache")
    assert result.token_ids == expected.token_ids
    assert result.cached_tokens == expected.cached_tokens > 600
    assert counts(second)["read_tokens"] > 600
    if options.get("kv_cache_bits"):
        share = sum(map(len, redis_server.values().values())) / (704 * 768)
        assert share < 16 / options["kv_cache_bits"] / 2, "quantized chunks travel quantized"


@pytest.mark.usefixtures("patient")
def test_only_what_is_used_again_is_written(redis_server: RedisServer, machine: MakeEngine) -> None:
    engine = machine(redis_server.url, remote_write="reused")
    same_as_baseline(engine, PROMPT)
    assert written(engine)["written_chunks"] == 0
    assert redis_server.values() == {}
    same_as_baseline(engine, [*PROMPT[:320], *random_ids(20, seed=5)])
    assert written(engine)["written_chunks"] == 10
    assert same_as_baseline(machine(redis_server.url), PROMPT).cached_tokens == 320


@pytest.mark.usefixtures("patient")
def test_what_another_has_written_is_not_written_again(
    redis_server: RedisServer, machine: MakeEngine
) -> None:
    engines = [machine(redis_server.url) for _ in range(2)]
    for engine in engines:
        engine.warm(PROMPT)  # the second reads it or computes it; either way it is there
    found = [written(engine) for engine in engines]
    assert found[0]["written_chunks"] + found[1]["written_chunks"] == 22


@pytest.mark.usefixtures("patient")
def test_records_carry_no_text(redis_server: RedisServer, machine: MakeEngine) -> None:
    engine = machine(redis_server.url)
    secret = "the treasure lies under the old oak tree behind the mill by the river, says the map"
    same_as_baseline(engine, secret)
    assert written(engine)["written_chunks"]
    assert not any(b"oak tree" in value for value in redis_server.values().values())


@pytest.mark.usefixtures("patient")
def test_disk_ram_and_a_shared_store_together(
    redis_server: RedisServer, machine: MakeEngine, tmp_path: Path
) -> None:
    first = machine(redis_server.url, disk_cache_dir=tmp_path / "a")
    same_as_baseline(first, PROMPT)
    written(first)
    second = machine(redis_server.url, disk_cache_dir=tmp_path / "b")
    assert same_as_baseline(second, PROMPT).cached_tokens == 699
    second.close()  # what came from afar is saved here too
    third = machine(None, disk_cache_dir=tmp_path / "b")
    assert same_as_baseline(third, PROMPT).cached_tokens == 699


# --- another process -------------------------------------------------------------------------------

PROGRAM = """
import json, sys, torch
torch.set_num_threads(1)
from kvboost import KVBoost
from kvboost.remote import cache
from tests.tiny_models import long_model, tiny_tokenizer
address, kind, prompt = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
if kind == "tiny":
    cache._LEAST_S = 10.0
    engine = KVBoost(long_model(), tiny_tokenizer(), chunk_size=32, remote_cache=address)
else:
    engine = KVBoost.from_pretrained(kind, remote_cache=address, device="cpu")
result = engine.generate(prompt, max_new_tokens=8, mode="prefix_cache")
baseline = engine.generate(prompt, max_new_tokens=8, mode="baseline")
print(json.dumps({
    "tokens": list(result.token_ids), "baseline": list(baseline.token_ids), "cached": result.cached_tokens,
    "remote": engine.cache_stats()["remote"], "family": engine.core.parts.fit.family,
}))
engine.close()
"""


def another_machine(home: Path, address: str, kind: str, prompt: Any) -> dict[str, Any]:
    """What a process with a home of its own says."""
    command = [sys.executable, "-c", PROGRAM, address, kind, json.dumps(prompt)]
    done = subprocess.run(
        command, cwd=home, env=environment(home), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("kind", ["redis", "s3"])
def test_another_process_with_a_home_of_its_own(
    kind: str, request: pytest.FixtureRequest, machine: MakeEngine, tmp_path: Path
) -> None:
    server = request.getfixturevalue("redis_server" if kind == "redis" else "s3")
    address = server.url if kind == "redis" else server.url("process")
    engine = machine(address)
    expected = same_as_baseline(engine, PROMPT, new_tokens=8)
    written(engine)
    found = another_machine(tmp_path, address, "tiny", PROMPT)
    assert found["tokens"] == found["baseline"] == list(expected.token_ids)
    assert found["cached"] == 699
    assert found["remote"]["round_trips"] == 1 + found["remote"]["read_chunks"]


@pytest.mark.usefixtures("patient")
def test_a_model_in_another_folder_is_the_same_model(redis_server: RedisServer, tmp_path: Path) -> None:
    """Where a checkpoint lies on a machine is no part of what its KV belongs to."""
    for name in ("a", "b/c"):
        long_model().save_pretrained(tmp_path / name)
        tiny_tokenizer().save_pretrained(tmp_path / name)
    options = {"remote_cache": redis_server.url, "chunk_size": 32, "device": "cpu"}
    with KVBoost.from_pretrained(str(tmp_path / "a"), **options) as first:
        first.warm(PROMPT)
        written(first)
        with KVBoost.from_pretrained(str(tmp_path / "b/c"), **options) as second:
            assert second.core.parts.fit.family == first.core.parts.fit.family
            assert same_as_baseline(second, PROMPT).cached_tokens == 699


@pytest.mark.real_model
@pytest.mark.parametrize("kind", ["redis", "s3"])
def test_the_built_in_model_in_another_process(
    kind: str, request: pytest.FixtureRequest, real: KVBoost, tmp_path: Path
) -> None:
    """With the deadlines that it has: no test stretches them."""
    server = request.getfixturevalue("redis_server" if kind == "redis" else "s3")
    address = server.url if kind == "redis" else server.url("builtin")
    prompt = "The history of the city begins at a ford of the river. " * 24
    with KVBoost(real.model, real.tokenizer, remote_cache=address) as engine:
        expected = engine.generate(prompt, max_new_tokens=8, mode="prefix_cache")
        written(engine)
    folder = checkpoint_folder()  # it has the weights, as every machine with the model has
    models = tmp_path / ".cache" / "kvboost" / "models"
    models.mkdir(parents=True)
    (models / folder.name).symlink_to(folder)
    found = another_machine(tmp_path, address, "builtin", prompt)
    assert found["tokens"] == found["baseline"] == list(expected.token_ids)
    assert found["cached"] == expected.prompt_tokens - 1, found["remote"]
