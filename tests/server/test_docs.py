"""docs/server.md: its recipes run against a real server, and its tables are complete."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvboost import KVBoost
from kvboost.server.app import create_app
from kvboost.server.cache_schemas import WarmRequest
from kvboost.server.schemas import ChatRequest, CompletionRequest
from kvboost.server.settings import ServerSettings
from tests.docs import option_tables
from tests.server.running import Running, running

PAGE = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
ADDRESS = "http://127.0.0.1:8000"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def table(heading: str) -> list[list[str]]:
    """The rows of the first table under a heading."""
    part = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


# --- recipes ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(real_engine: KVBoost) -> Iterator[Running]:
    real_engine.clear()
    with running(real_engine, model_name="builtin", shutdown_timeout_s=30) as server:
        yield server


@pytest.mark.integration
@pytest.mark.real_model
def test_python_clients(server: Running) -> None:
    scope: dict[str, Any] = {}
    printed = []
    for block in blocks("py"):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(block.replace(ADDRESS, server.url), "server.md", "exec", dont_inherit=True), scope)
        printed.append(output.getvalue())
    assert len(printed) == 4
    first, _, second, counts, _ = printed[0].splitlines()
    assert first == second
    assert re.fullmatch(r"(\d+) of \d+ prompt tokens from the cache", counts)
    assert int(counts.split()[0]) > 300
    assert printed[1].startswith(first)
    assert "noon" in printed[2]
    assert re.search(r" \d{3,} ?", printed[3]), "LangChain says how much came from the cache"


@pytest.mark.integration
@pytest.mark.real_model
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl(server: Running) -> None:
    commands = [block for block in blocks("bash") if block.startswith("curl")]
    assert len(commands) == 1
    script = commands[0].replace(ADDRESS, server.url).replace("curl ", "curl --silent --fail-with-body ")
    done = subprocess.run(["bash", "-e", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"chat.completion"' in done.stdout
    assert "data: [DONE]" in done.stdout
    assert '"prompt_tokens"' in done.stdout


# --- tables ----------------------------------------------------------------------------------


def test_every_flag_is_explained() -> None:
    assert option_tables.with_tables(PAGE, option_tables.server_table()) == PAGE


def test_every_field_is_explained() -> None:
    chat: set[str] = set()
    text: set[str] = set()
    for names, in_chat, in_text, _ in table("Requests"):
        fields = set(re.findall(r"`(\w+)`", names))
        chat |= fields if in_chat else set()
        text |= fields if in_text else set()
    assert chat == ChatRequest.model_fields.keys()
    assert text == CompletionRequest.model_fields.keys()
    for name in WarmRequest.model_fields:
        assert f'"{name}"' in PAGE or f"`{name}`" in PAGE


def test_every_route_is_explained(make_engine: Any) -> None:
    app = create_app(make_engine(), ServerSettings())
    described = {
        f"{method.upper()} {path}"
        for path, operations in app.openapi()["paths"].items()
        for method in operations
    }
    documented = {name for row in table("Routes") for name in re.findall(r"`(\w+ /[^`]*)`", row[0])}
    app.state.service.close(0)
    assert described <= documented
    assert documented - described == {"GET /", "GET /page/...", "GET /openapi.json"}
