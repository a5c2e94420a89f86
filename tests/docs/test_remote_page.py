"""The example of docs/remote.md, run by two engines that share a Redis and nothing else."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvboost import KVBoost
from tests.remote.servers import RedisServer, need_redis

PAGE = (Path(__file__).parents[2] / "docs" / "remote.md").read_text()


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    need_redis()
    server = RedisServer(tmp_path)
    yield server
    server.kill()


@pytest.mark.integration
@pytest.mark.real_model
def test_the_quick_start(redis_server: RedisServer, real: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"```py\n(.*?)```", PAGE, re.DOTALL)
    assert "redis://localhost:6379" in block

    def opened(_name: str, **options: Any) -> KVBoost:
        return KVBoost(real.model, real.tokenizer, **options)

    monkeypatch.setattr(KVBoost, "from_pretrained", opened)
    printed = []
    for _ in range(2):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(block.replace("redis://localhost:6379", redis_server.url), "remote.md", "exec"), {})
        printed.append(output.getvalue().strip())
    assert printed[0] == "0 never stored"
    tokens, _, reason = printed[1].partition(" ")
    assert f"prints {tokens} and `remote, " in PAGE, printed[1]
    assert re.fullmatch(r"remote, \d+ ms", reason)
