"""`kvboost serve` as a process that is told to end, or killed, under load: no finished answer is lost, and
the disk cache is whole afterwards."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvboost.bench.serve_servers import KVBOOST_COMMAND, ServerProcess
from kvboost.bench.stream_client import Address, Reply, ask
from kvboost.cli.main import main
from tests.tiny_models import random_ids, tiny_model, tiny_tokenizer

for needed in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(needed)

ROUTE = "/v1/completions"
PROMPT_TOKENS = 96
CHUNK = 16
Start = Callable[..., ServerProcess]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny model that never ends an answer by itself."""
    folder: Path = tmp_path_factory.mktemp("models") / "tiny"
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def start(model: str, tmp_path: Path) -> Iterator[Start]:
    """Starts `kvboost serve` with a disk cache in `tmp_path / "kv"`; it ends with the test."""
    servers = []

    def begin(*flags: str) -> ServerProcess:
        command = [*KVBOOST_COMMAND, "serve", model, "--port", "{port}", "--chunk-size", str(CHUNK)]
        command += ["--disk-cache-dir", str(tmp_path / "kv"), "--disk-cache-bytes", "none", *flags]
        environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        servers.append(ServerProcess(command, ready_path="/ready", environment=environment))
        asyncio.run(servers[-1].wait_until_ready(120.0))
        return servers[-1]

    yield begin
    for server in servers:
        server.stop()


def body(number: int, new_tokens: int, *, stream: bool = False) -> dict[str, Any]:
    prompt = random_ids(PROMPT_TOKENS, number)
    fields = {"model": "tiny", "prompt": prompt, "max_tokens": new_tokens, "temperature": 0}
    return {**fields, "stream": True, "stream_options": {"include_usage": True}} if stream else fields


def complete(reply: Reply, new_tokens: int) -> bool:
    """Whether all of the answer arrived; where not, the client must have been told so."""
    if reply.status == 503:
        assert reply.json["error"]["code"] == "shutting_down"
        return False
    assert reply.status == 200, (reply.status, reply.error, reply.body)
    if reply.error is not None:
        assert "shut down" in reply.error, reply.error
        return False
    answer = reply.json if reply.body else {"usage": reply.usage}
    assert answer["usage"]["completion_tokens"] == new_tokens
    return True


def check_disk(folder: Path, *, is_closed: bool) -> int:
    """`kvboost disk check` finds nothing wrong; how many chunks there are."""
    done = CliRunner().invoke(main, ["disk", "check", str(folder), "--json"])
    assert done.exit_code == 0, done.output
    (found,) = json.loads(done.stdout)
    assert (found["corrupt"], found["problems"]) == ([], [])
    assert found["good"] + found["free"] + found["writing"] == found["slots"]
    if is_closed:
        assert found["writing"] == 0
        tier = Path(found["folder"])
        assert list((tier / "owners").iterdir()) == []
        connection = sqlite3.connect(tier / "index.sqlite")
        assert connection.execute("SELECT count(*) FROM claims").fetchone() == (0,)
        connection.close()
    return int(found["good"])


async def cached(address: Address, number: int) -> int:
    """How much of a prompt's KV was found."""
    reply = await ask(address, ROUTE, body(number, 1))
    assert reply.status == 200, reply.body
    return int(reply.json["usage"]["prompt_tokens_details"]["cached_tokens"])


async def until_saved(address: Address) -> None:
    """Wait until all that is stored is on disk."""
    for _ in range(500):
        stats = (await ask(address, "/v1/cache/stats")).json
        if stats["cache"]["disk"]["unsaved_chunks"] == 0:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(stats["cache"]["disk"])


def test_sigterm_under_load_loses_no_finished_answer(start: Start, tmp_path: Path) -> None:
    """More requests than sequences in the batch, and less time than they need: all are finished or told."""
    server = start("--max-sequences", "4", "--shutdown-timeout", "1.5")
    lengths = [20 + 60 * (number % 12) for number in range(36)]

    async def load() -> list[Reply]:
        asked = [
            asyncio.create_task(ask(server.address, ROUTE, body(number, tokens, stream=bool(number % 2))))
            for number, tokens in enumerate(lengths)
        ]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        server.signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        late = await ask(server.address, ROUTE, body(99, 1))
        assert late.status == 503
        return list(await asyncio.gather(*asked))

    replies = asyncio.run(load())
    finished = [
        number
        for number, (reply, tokens) in enumerate(zip(replies, lengths, strict=True))
        if complete(reply, tokens)
    ]
    assert server.wait(30.0) == 0
    assert 0 < len(finished) < len(lengths), "some were finished, some were told"
    logged = re.findall(r"POST /v1/completions 200 .*", server.log)
    assert len([line for line in logged if "ended by" not in line]) == len(finished)
    assert "Traceback" not in server.log
    assert check_disk(tmp_path / "kv", is_closed=True) >= len(finished) * (PROMPT_TOKENS // CHUNK)
    again = start()

    async def look() -> list[int]:
        return [await cached(again.address, number) for number in finished]

    assert set(asyncio.run(look())) == {PROMPT_TOKENS - 1}, "all that was read is on disk"


@pytest.mark.integration
@pytest.mark.timed
@pytest.mark.parametrize("flags", [(), ("--no-batching",)])
def test_kill_9_under_load_and_a_restart_from_disk(
    start: Start, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    draw = random.Random(len(flags))
    for life in range(2):
        server = start(*flags)
        if life:
            assert check_disk(tmp_path / "kv", is_closed=False) > 0
        asyncio.run(live_and_die(server, life, draw))
    server = start(*flags)

    async def look() -> list[int]:
        return [await cached(server.address, life) for life in range(2)]

    assert asyncio.run(look()) == [PROMPT_TOKENS - 1] * 2
    server.stop()
    assert "ended" in server.log
    check_disk(tmp_path / "kv", is_closed=True)


async def live_and_die(server: ServerProcess, life: int, draw: random.Random) -> None:
    """Serve what earlier lives have read, read something new, and be killed amid other requests."""
    for earlier in range(life):
        assert await cached(server.address, earlier) == PROMPT_TOKENS - 1, "served from disk"
    assert await cached(server.address, life) == 0
    await until_saved(server.address)
    others = [
        asyncio.create_task(ask(server.address, ROUTE, body(100 * life + number, 200, stream=True)))
        for number in range(10, 26)
    ]
    await asyncio.sleep(draw.uniform(0.1, 1.0))
    server.kill()
    started = time.monotonic()
    replies = await asyncio.gather(*others)
    assert time.monotonic() - started < 5, "clients of a killed server do not hang"
    assert not all(reply.is_answered for reply in replies)
