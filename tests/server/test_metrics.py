"""/metrics for Prometheus, and a dashboard that asks for nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvboost.remote.byte_store import UNREACHABLE, StoreError
from tests.fixture_types import MakeEngine
from tests.server.running import HELLO, Running, Serve
from tests.tiny_models import random_ids
from tests.unit.remote.memory_store import MemoryStore

DOCS = Path(__file__).parents[2] / "docs"
DASHBOARD = DOCS / "grafana-dashboard.json"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    """What every address of a shared store leads to."""
    made = MemoryStore()
    monkeypatch.setattr("kvboost.parts.engine_parts.open_store", lambda _address: made)
    return made


def samples(server: Running) -> dict[str, float]:
    """All samples by name and labels."""
    server.settle()
    response = server.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    found = {}
    for family in text_string_to_metric_families(response.text):
        assert family.documentation
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def test_numbers_of_requests(make_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_engine())
    prompt = random_ids(40, 1)
    for _ in range(2):
        server.complete(prompt, temperature=0, max_tokens=5)
    server.chat(max_tokens=2, n=2)
    server.client.post("/v1/completions", json={})
    server.client.get("/nowhere/at/all")
    chat_tokens = server.service.engine.tokenize(HELLO)
    found = samples(server)
    assert found["kvboost_requests_total{route=/v1/completions,status=200}"] == 2
    assert found["kvboost_requests_total{route=/v1/completions,status=400}"] == 1
    assert found["kvboost_requests_total{route=/v1/chat/completions,status=200}"] == 1
    assert found["kvboost_requests_total{route=other,status=404}"] == 1
    assert found["kvboost_prompt_tokens_total{}"] == 80 + len(chat_tokens)
    assert found["kvboost_cached_tokens_total{}"] == 39
    assert 10 + 2 <= found["kvboost_completion_tokens_total{}"] <= 10 + 4
    assert found["kvboost_ttft_seconds_count{}"] == found["kvboost_request_seconds_count{}"] == 3
    assert 0 < found["kvboost_ttft_seconds_sum{}"] <= found["kvboost_request_seconds_sum{}"]
    assert found["kvboost_requests_waiting{}"] == found["kvboost_requests_running{}"] == 0
    assert found["kvboost_worker_requests_total{end=answered}"] == 4
    assert found["kvboost_batch_steps_total{}"] > 5
    assert found["kvboost_batch_decoded_tokens_total{}"] >= 12
    assert found["kvboost_batch_prefilled_tokens_total{}"] > 40
    assert found["kvboost_cache_bytes{tier=memory}"] > 0
    assert found["kvboost_cache_chunks{tier=memory}"] > 2
    assert found["kvboost_cache_bytes{tier=disk}"] == 0


def test_two_servers_do_not_mix(make_engine: MakeEngine, serve: Serve) -> None:
    one, other = serve(make_engine()), serve(make_engine(), batching=False)
    one.complete("a", max_tokens=1)
    assert samples(other)["kvboost_prompt_tokens_total{}"] == 0
    assert not [name for name in samples(other) if "batch" in name]


def test_a_disk_is_counted(make_engine: MakeEngine, serve: Serve, tmp_path: Path) -> None:
    engine = make_engine(disk_cache_dir=str(tmp_path))
    server = serve(engine)
    server.complete(random_ids(40, 1), max_tokens=1)
    server.service.worker.call(lambda: None).result()  # the step before it is over, and all is stored
    assert engine.core.parts.disk is not None
    engine.core.parts.disk.flush()
    found = samples(server)
    assert found["kvboost_cache_chunks{tier=disk}"] > 0
    assert found["kvboost_cache_bytes{tier=disk}"] > 0


def test_a_shared_store_is_counted(make_engine: MakeEngine, serve: Serve, store: MemoryStore) -> None:
    prompt = random_ids(192, 1)
    for _ in range(2):  # two machines
        engine = make_engine(remote_cache="redis://elsewhere", chunk_size=32)
        server = serve(engine)
        server.complete(prompt, max_tokens=1)
        server.service.worker.call(lambda: None).result()
        assert engine.core.parts.remote is not None
        assert engine.core.parts.remote.flush()
        found = samples(server)
        assert found["kvboost_remote_up{}"] == 1
    assert found["kvboost_remote_read_tokens_total{}"] == 192
    assert found["kvboost_remote_read_bytes_total{}"] > 0
    store.error = StoreError(UNREACHABLE)
    server.complete(random_ids(200, 2), max_tokens=1)
    found = samples(server)
    assert found["kvboost_remote_up{}"] == 0
    assert found["kvboost_remote_misses_total{reason=not reachable}"] == 1


# --- the dashboard ---------------------------------------------------------------------------


def expressions(part: Any) -> Iterator[str]:
    """Everything that a dashboard asks Prometheus for."""
    if isinstance(part, dict):
        for name, value in part.items():
            if name in ("expr", "query") and isinstance(value, str):
                yield value
            yield from expressions(value)
    elif isinstance(part, list):
        for value in part:
            yield from expressions(value)


@pytest.mark.usefixtures("store")
def test_the_dashboard_asks_for_what_there_is(make_engine: MakeEngine, serve: Serve) -> None:
    engine = make_engine(remote_cache="redis://elsewhere", chunk_size=8)  # too short to be written
    server = serve(engine)
    server.complete(random_ids(100, 1), max_tokens=2)
    server.service.worker.call(lambda: None).result()
    assert engine.core.parts.remote is not None
    engine.core.parts.remote.flush()
    there = {name.partition("{")[0] for name in samples(server)}
    dashboard = json.loads(DASHBOARD.read_text())
    asked = {name for text in expressions(dashboard) for name in re.findall(r"kvboost_\w+", text)}
    assert asked
    assert asked <= there
    counted = {name for name in there if not name.endswith(("_created", "_count", "_sum"))}
    assert counted <= asked, "what is counted is shown"


def test_the_dashboard_holds_together() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["title"]
        assert panel["targets"] or panel["type"] == "row"
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
    assert "http" not in DASHBOARD.read_text(), "nothing from elsewhere"


@pytest.mark.usefixtures("store")
def test_the_documentation_names_every_metric(make_engine: MakeEngine, serve: Serve) -> None:
    page = (DOCS / "server.md").read_text()
    server = serve(make_engine(remote_cache="redis://elsewhere"))
    names = {family.name for family in text_string_to_metric_families(server.client.get("/metrics").text)}
    for name in names:
        assert f"`{name}" in page or name.endswith("_created"), name
