"""What a request may reuse: `mode`, `recompute_ratio` and `selector` as fields of the API."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.engine.reuse_checks import documents, joined, pay_always, shelf_engine
from tests.fixture_types import MakeEngine
from tests.server.running import MODEL, Running, Serve
from tests.tiny_models import long_model, random_ids

SHELF = documents(3, seed=62, low=90, high=160)
PROMPT = [*random_ids(5, seed=1), *joined(SHELF[::-1]), *random_ids(9, seed=2)]


@pytest.fixture(params=[True, False], ids=["batching", "alone"])
def server(
    request: pytest.FixtureRequest, make_engine: MakeEngine, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> Running:
    pay_always(monkeypatch)
    return serve(shelf_engine(make_engine, SHELF, model=long_model()), batching=request.param)


def test_every_request_has_its_own_mode(server: Running) -> None:
    exact = server.complete(PROMPT, max_tokens=4, temperature=0)["kvboost"]
    assert (exact["mode"], exact["cached_tokens"]) == ("prefix_cache", 0)
    again = server.complete([*PROMPT[:5], *PROMPT[6:]], max_tokens=4, temperature=0, mode="chunk_kv_reuse")
    repaired = again["kvboost"]
    assert repaired["mode"] == "chunk_kv_reuse"
    assert repaired["cached_tokens"] > 200
    assert 0 < repaired["recomputed_tokens"] < repaired["cached_tokens"]


def test_approximate_answers_are_counted_and_logged_once(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """With warnings as errors, as in all tests, nothing fails."""
    for number in range(3):
        prompt = [*random_ids(5, seed=90 + number), *PROMPT[5:]]
        found = server.complete(prompt, max_tokens=4, temperature=0, mode="chunk_kv_reuse")["kvboost"]
        assert found["approximate_tokens"] > 0
        assert found["saved_tokens"] == found["exact_tokens"] + found["approximate_tokens"]
        assert found["saved_tokens"] == found["cached_tokens"] - found["recomputed_tokens"]
        assert found["decode_tokens_per_sec"] > 0
    server.service.worker.call(lambda: None).result()  # what is said of an answer comes behind it
    told = [record for record in caplog.records if "reused approximately" in record.message]
    assert [record.levelname for record in told] == ["WARNING"]
    assert told[0].name.startswith("kvboost.")


def test_exact_answers_among_repaired_ones(server: Running) -> None:
    """Many clients at once: who asks for exact reuse gets the model's own answer."""
    prompts = [[*random_ids(5, seed=80 + i), *joined(SHELF[:: 1 - 2 * (i % 2)]), i] for i in range(6)]
    asked = [(prompt, mode) for prompt in prompts for mode in ("chunk_kv_reuse", "prefix_cache")]
    with ThreadPoolExecutor(len(asked)) as pool:
        replies = list(
            pool.map(lambda ask: server.complete(ask[0], max_tokens=6, temperature=0, mode=ask[1]), asked)
        )
    for (prompt, mode), reply in zip(asked, replies, strict=True):
        if mode == "prefix_cache":
            plain = server.service.engine.generate(prompt, 6, mode="baseline")
            assert reply["choices"][0]["text"] == plain.output_text
            assert reply["kvboost"]["recomputed_tokens"] == 0
        else:
            assert reply["kvboost"]["cached_tokens"] > 200


def test_ratio_and_selector(server: Running) -> None:
    for number, selector in enumerate(("guided", "deviation")):
        prompt = [*random_ids(5, seed=70 + number), *PROMPT[5:]]
        found = server.complete(
            prompt, max_tokens=2, temperature=0, mode="chunk_kv_reuse", recompute_ratio=0.4, selector=selector
        )["kvboost"]
        assert found["recomputed_tokens"] > 60


def test_explain_takes_them_too(server: Running) -> None:
    assert server.post("/v1/cache/explain", prompt=PROMPT)["cached_tokens"] == 0
    found = server.post(
        "/v1/cache/explain", prompt=PROMPT, mode="chunk_kv_reuse", recompute_ratio=0.5, selector="guided"
    )
    assert found["cached_tokens"] > 200
    assert "would be computed again" in found["choice"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"mode": "fastest"}, "mode"),
        ({"mode": 3}, "mode"),
        ({"mode": "baseline"}, "mode"),
        ({"mode": "chunk_kv_reuse", "recompute_ratio": 1.1}, "recompute_ratio"),
        ({"mode": "chunk_kv_reuse", "recompute_ratio": "half"}, "recompute_ratio"),
        ({"mode": "chunk_kv_reuse", "selector": "best"}, "selector"),
        ({"recompute_ratio": 0.5}, "recompute_ratio"),
        ({"mode": "prefix_cache", "selector": "guided"}, "selector"),
    ],
    ids=str,
)
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/cache/explain"])
def test_what_cannot_be_had_is_refused(
    server: Running, fields: dict[str, object], param: str, route: str
) -> None:
    body = {"prompt": PROMPT, **fields} | ({"model": MODEL} if route == "/v1/completions" else {})
    reply = server.client.post(route, json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


def test_warming_reads_exactly_whatever_the_mode(
    make_engine: MakeEngine, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moved text in what is warmed is computed: only so is it an exact prefix of later prompts."""
    pay_always(monkeypatch)
    server = serve(shelf_engine(make_engine, SHELF, model=long_model()), mode="chunk_kv_reuse")
    assert server.post("/v1/cache/warm", prompt=PROMPT)["cached_tokens"] == 0
    found = server.complete([*PROMPT, 7], max_tokens=2, mode="prefix_cache")["kvboost"]
    assert found["cached_tokens"] == len(PROMPT)
