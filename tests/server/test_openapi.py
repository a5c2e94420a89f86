"""The OpenAPI document tells the truth: requests made from it never break the server, and answers fit it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode, checks

from kvboost import KVBoost
from kvboost.server.schemas import ChatRequest, CompletionRequest
from tests.server.running import Running, running
from tests.threads import one_torch_thread
from tests.tiny_models import tiny_model, tiny_tokenizer


def rejected(context: Any, response: Any, case: Any) -> bool | None:
    """What violates the schema is refused; a body that is too large before it is read."""
    if response.status_code == 413:
        return None
    return checks.negative_data_rejection(context, response, case)  # type: ignore[no-any-return]


CHECKS = (
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    rejected,
)
ROUTES = [
    *(("POST", f"/v1/{name}") for name in ("chat/completions", "completions")),
    *(("POST", f"/v1/cache/{name}") for name in ("warm", "explain", "pin", "unpin", "clear")),
    *(("GET", path) for path in ("/v1/cache/stats", "/v1/models", "/v1/models/{name}", "/metrics")),
    *(("GET", path) for path in ("/health", "/ready")),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    engine = KVBoost(tiny_model("llama"), tiny_tokenizer(), chunk_size=16, max_chunks=50)
    with (
        one_torch_thread(),
        running(engine, default_max_tokens=3, timeout_s=1, max_waiting=200, mode="chunk_kv_reuse") as server,
    ):
        yield server
        assert server.client.get("/ready").status_code == 200
        assert server.stats()["worker"]["failed"] == 0
    engine.cache_manager.check_integrity()
    engine.close()


@pytest.fixture(scope="module")
def document(server: Running) -> dict[str, Any]:
    found: dict[str, Any] = server.client.get("/openapi.json").json()
    return found


@pytest.fixture(scope="module")
def api(server: Running) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


@pytest.mark.parametrize("kind", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["good", "bad"])
@pytest.mark.parametrize(("method", "path"), ROUTES, ids=[path for _, path in ROUTES])
def test_no_request_breaks_the_server(
    server: Running, api: Any, method: str, path: str, kind: GenerationMode
) -> None:
    operation = api[path][method]
    before = server.stats()["requests"]["count"]

    @given(case=operation.as_strategy(generation_mode=kind))
    @settings(
        max_examples=100 if path.endswith("completions") else 40,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[*HealthCheck],
    )
    def call(case: Any) -> None:
        case.call_and_validate(checks=CHECKS)

    if kind is GenerationMode.POSITIVE or "requestBody" in operation.definition.raw:
        call()
    if kind is GenerationMode.POSITIVE and path.endswith("completions"):
        assert server.stats()["requests"]["count"] > before + 3, "some requests were good ones"


def test_every_route_is_described(document: dict[str, Any]) -> None:
    assert {path for _, path in ROUTES} == document["paths"].keys()
    for path in document["paths"].values():
        for operation in path.values():
            assert operation["summary"]
            assert {"200", "4XX", "5XX"} == operation["responses"].keys()


def test_bodies_are_described_with_every_field(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for kind in (ChatRequest, CompletionRequest):
        described = schemas[kind.__name__]
        assert described["properties"].keys() == kind.model_fields.keys()
        assert described["additionalProperties"] == {"type": "null"}
        assert described["properties"]["model"]["enum"] == ["tiny"]
    for name in (
        "ChatCompletion",
        "ChatChunk",
        "TextCompletion",
        "CacheStats",
        "ErrorBody",
        "Usage",
        "Reuse",
    ):
        assert name in schemas
    assert "HTTPValidationError" not in schemas
