"""/v1/cache/..., health, and the page's files."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import kvboost.server
from kvboost.server.answers import CacheStats
from tests.fixture_types import MakeEngine
from tests.server.running import HELLO, Serve
from tests.tiny_models import random_ids


@pytest.mark.parametrize("batching", [True, False])
@pytest.mark.parametrize("mode", ["prefix_cache", "chunk_kv_reuse"])
def test_warm_then_ask(make_engine: MakeEngine, serve: Serve, batching: bool, mode: str) -> None:
    engine = make_engine()
    server = serve(engine, batching=batching, mode=mode)
    rules = [{"role": "system", "content": "Lunch is served at noon. Dogs are welcome. " * 4}]
    warmed = server.post("/v1/cache/warm", messages=rules)
    assert warmed.keys() == {"prompt_tokens", "cached_tokens", "ms"}
    assert warmed["cached_tokens"] == 0
    known = len(engine.tokenize(rules))
    assert warmed["prompt_tokens"] == known
    again = server.post("/v1/cache/warm", messages=rules)
    assert again["cached_tokens"] >= known - 1
    answer = server.chat([*rules, *HELLO], max_tokens=1)
    assert answer["kvboost"]["cached_tokens"] >= known - 2
    assert server.stats()["requests"]["count"] == 1, "warming is no answer"


def test_explain_says_why_and_changes_nothing(make_engine: MakeEngine, serve: Serve) -> None:
    engine = make_engine()
    server = serve(engine)
    text = "a text that is known already, all of it"
    server.post("/v1/cache/warm", prompt=text)
    before = server.stats()["cache"]
    found = server.post("/v1/cache/explain", prompt=text.replace("known", "not known"))
    assert found.keys() == {"prompt_tokens", "cached_tokens", "choice", "spans"}
    assert "".join(span["text"] for span in found["spans"]) == text.replace("known", "not known")
    assert {"start", "end", "origin", "reason", "donor", "text"} == found["spans"][0].keys()
    assert found["spans"][0]["origin"] == "exact"
    assert any("diverged at token" in span["reason"] for span in found["spans"])
    assert found == {
        **found,
        **engine.explain(text.replace("known", "not known")).to_dict(),
        "spans": found["spans"],
    }
    after = server.stats()["cache"]
    assert (after["chunks"], after["requests"]) == (before["chunks"], before["requests"])
    assert server.post("/v1/cache/explain", messages=HELLO)["cached_tokens"] == 0
    assert server.post("/v1/cache/explain", prompt=random_ids(9, 1))["prompt_tokens"] == 9


def test_pins_outlive_a_clear(make_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_engine())
    kept, other = random_ids(40, 1), random_ids(40, 2)
    for prompt in (kept, other):
        server.post("/v1/cache/warm", prompt=prompt)
    assert server.post("/v1/cache/pin", prompt=kept) == {"tokens": 40}
    assert server.stats()["cache"]["pinned_chunks"] == 3
    assert server.client.post("/v1/cache/clear").json() == {"chunks": 3}
    assert server.post("/v1/cache/explain", prompt=kept)["cached_tokens"] > 0
    assert server.post("/v1/cache/explain", prompt=other)["cached_tokens"] == 0
    assert server.complete(other, max_tokens=1)["kvboost"]["cached_tokens"] == 0, (
        "not out of the batch either"
    )
    assert server.post("/v1/cache/unpin", prompt=kept) == {"tokens": 40}
    assert server.client.post("/v1/cache/clear").json() == {"chunks": 0}


def test_clear_while_an_answer_is_on_its_way(make_slow_engine: MakeEngine, serve: Serve) -> None:
    engine = make_slow_engine(0.01)
    server = serve(engine)
    expected = engine.generate(HELLO, 40, "baseline").output_text
    with server.client.stream(
        "POST",
        "/v1/chat/completions",
        json={"model": "tiny", "messages": HELLO, "max_tokens": 40, "temperature": 0, "stream": True},
    ) as response:
        lines = response.iter_lines()
        next(lines)
        assert server.client.post("/v1/cache/clear").status_code == 200
        rest = "\n".join(lines)
    assert rest.rstrip().endswith("data: [DONE]")
    assert server.chat(temperature=0, max_tokens=40)["choices"][0]["message"]["content"] == expected


def test_stats(make_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_engine(), model_name="name", mode="prefix_cache")
    before = time.time()
    for _ in range(3):
        server.post("/v1/completions", model="name", prompt=random_ids(40, 3), max_tokens=4, temperature=0)
    stats = server.stats()
    CacheStats.model_validate(stats)
    assert (stats["model"], stats["mode"]) == ("name", "prefix_cache")
    assert stats["uptime_s"] > 0
    assert stats["worker"]["answered"] == 3
    assert stats["batch"]["max_sequences"] == 32
    assert stats["batch"]["sequences"] == 0
    assert stats["batch"]["decoded_tokens"] == 12
    assert stats["batch"]["resident_tokens"] > 0
    assert stats["batch"]["kv_bytes"] > 0
    requests = stats["requests"]
    assert requests["count"] == 3
    assert requests["hit_share"] == pytest.approx(2 * 39 / 120)
    assert [each["cached_tokens"] for each in requests["recent"]] == [0, 39, 39]
    assert before <= requests["recent"][0]["at"] <= requests["recent"][-1]["at"] <= time.time()
    assert stats["cache"]["chunks"] == 3
    assert "chunks" not in stats
    assert serve(make_engine(), batching=False).stats()["batch"] is None


def test_no_more_than_the_last_200_requests_are_told(make_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_engine())
    server.complete("a", max_tokens=1)
    recent = server.service._recent
    recent.extend([recent[0]] * 500)
    assert len(server.stats()["requests"]["recent"]) == 200


def test_chunks_by_use(make_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_engine())
    often, once = random_ids(16, 1), random_ids(16, 2)
    for prompt in (often, often, often, once):
        server.complete(prompt, max_tokens=1)
    chunks = server.stats(chunks=2)["chunks"]
    assert len(chunks) == 2
    assert chunks[0].keys() == {"id", "tokens", "uses", "tier", "age_s"}, "no text"
    assert chunks[0]["uses"] >= chunks[1]["uses"]
    assert chunks[0]["tokens"] == 16
    assert (chunks[0]["tier"], chunks[0]["age_s"] < 60) == ("memory", True)
    assert len(server.stats(chunks=100)["chunks"]) == server.stats()["cache"]["chunks"]
    told = serve(make_engine(), log_prompts=True)
    told.complete("a text to be seen", max_tokens=1)
    assert told.stats(chunks=1)["chunks"][0]["text"].startswith("a text to be")


def test_what_is_on_disk_only(make_engine: MakeEngine, serve: Serve, tmp_path: Path) -> None:
    engine = make_engine(max_chunks=2, disk_cache_dir=str(tmp_path))
    server = serve(engine)
    for seed in range(4):
        server.complete(random_ids(32, seed), max_tokens=1)
        assert engine.core.parts.disk is not None
        engine.core.parts.disk.flush()
    stats = server.stats(chunks=100)
    assert stats["cache"]["disk"]["chunks"] > 2
    assert {chunk["tier"] for chunk in stats["chunks"]} == {"memory", "disk"}


def test_health_and_ready(make_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_engine())
    assert server.client.get("/health").json() == {"status": "ok"}
    assert server.client.get("/ready").json() == {"status": "ready"}
    server.service.begin_shutdown()
    response = server.client.get("/ready")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "shutting_down")
    assert server.client.get("/health").status_code == 200
    refused = server.client.post("/v1/chat/completions", json={"model": "tiny", "messages": HELLO})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")


def test_a_worker_that_has_ended(make_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_engine())
    server.service.worker.close(1)
    response = server.client.get("/ready")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "worker_ended")
    for route in ("warm", "pin", "unpin", "clear"):
        assert server.client.post(f"/v1/cache/{route}", json={"prompt": "hi"}).status_code == 503


def test_files_of_the_page(make_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_engine())
    folder = Path(kvboost.server.__file__).parent / "page"
    pages = {"/": folder / "index.html"}
    pages |= {f"/page/{path.name}": path for path in folder.iterdir() if path.is_file()}
    for route, path in pages.items():
        response = server.client.get(route)
        assert response.status_code == 200, route
        assert response.content == path.read_bytes()
        assert response.headers["content-security-policy"].startswith("default-src 'self';")
        assert response.headers["x-content-type-options"] == "nosniff"
    assert server.client.get("/").headers["content-type"].startswith("text/html")
    assert server.client.get("/page/nothing.js").status_code == 404


def test_pages_from_elsewhere_may_not_call_unless_told(make_engine: MakeEngine, serve: Serve) -> None:
    asked = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    closed = serve(make_engine())
    response = closed.client.options("/v1/chat/completions", headers=asked)
    assert response.status_code == 403
    assert not [name for name in response.headers if name.startswith("access-control")]
    answer = closed.client.get("/health", headers={"Origin": "https://example.org"})
    assert "access-control-allow-origin" not in answer.headers
    told = serve(make_engine(), cors_origins=("https://example.org",))
    response = told.client.options("/v1/chat/completions", headers=asked)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://example.org"
    other = told.client.options("/v1/chat/completions", headers={**asked, "Origin": "https://evil.example"})
    assert other.status_code == 403
    assert "access-control-allow-origin" not in other.headers


# --- documents ---------------------------------------------------------------------------------

DOCUMENTS = [
    "The ferry. It leaves from the stone pier at eight and at four, in summer also at noon. " * 2,
    "The market. Stalls are given out by lot on the last evening of the month. " * 2,
    "The school. Lessons begin after the milk has come, and end with the tide. " * 2,
]


@pytest.mark.parametrize("batching", [True, False])
def test_documents_are_warmed_and_found_anywhere(
    make_engine: MakeEngine, serve: Serve, batching: bool
) -> None:
    engine = make_engine()
    server = serve(engine, batching=batching)
    rules = [{"role": "system", "content": "Answer with the help of the documents."}]
    warmed = server.post("/v1/cache/warm", messages=rules, documents=[*DOCUMENTS, DOCUMENTS[0]])
    assert warmed.keys() == {"prompt_tokens", "cached_tokens", "ms", "documents"}
    assert [each["tokens"] for each in warmed["documents"]] == [
        len(text) for text in [*DOCUMENTS, DOCUMENTS[0]]
    ]
    assert all(each["chunks"] >= each["tokens"] // 16 for each in warmed["documents"])
    assert all(each["warning"] is None for each in warmed["documents"])
    assert warmed["documents"][0] == warmed["documents"][3]
    assert warmed["cached_tokens"] == 0
    assert warmed["prompt_tokens"] >= sum(map(len, DOCUMENTS)) + len(engine.tokenize(rules, warming=True))
    moved = "x" * 37 + "".join(reversed(DOCUMENTS))
    found = server.post("/v1/cache/explain", prompt=moved, mode="chunk_kv_reuse", recompute_ratio=0.1)
    if "would not pay" not in found["choice"]:
        assert found["cached_tokens"] >= 0.95 * sum(map(len, DOCUMENTS))
    again = server.post("/v1/cache/warm", messages=rules, documents=DOCUMENTS[::-1])
    assert again["prompt_tokens"] == again["cached_tokens"] == sum(map(len, DOCUMENTS))
    assert again["documents"] == warmed["documents"][2::-1]
    assert server.stats()["requests"]["count"] == 0, "warming is no answer"


def test_documents_without_a_prompt_and_in_several_windows(make_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_engine())  # 1,024 positions, so that not all of them fit into one
    numbers = [[number * 7919 + k * k * 104_729 for k in range(60)] for number in range(5)]
    texts = [" ".join(str(each % 10_007) for each in page) for page in numbers]
    warmed = server.post("/v1/cache/warm", documents=texts)
    assert all(each["warning"] is None for each in warmed["documents"])
    assert server.post("/v1/cache/warm", documents=texts)["cached_tokens"] == sum(map(len, texts))


def test_documents_of_one_salt_are_unknown_to_others(make_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_engine())
    server.post("/v1/cache/warm", documents=DOCUMENTS, cache_salt="one")
    assert server.post("/v1/cache/warm", documents=DOCUMENTS, cache_salt="two")["cached_tokens"] == 0
    assert server.post("/v1/cache/warm", documents=DOCUMENTS, cache_salt="one")["cached_tokens"] > 0


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "prompt", "give prompt, messages or documents"),
        ({"prompt": "a", "messages": HELLO, "documents": ["b"]}, "prompt", "either prompt or messages"),
        ({"documents": []}, "documents", "a list of 1 to 1000 texts"),
        ({"documents": "a text"}, "documents", "a list of 1 to 1000 texts"),
        ({"documents": ["a", ""]}, "documents", "none of them empty"),
        ({"documents": ["a"] * 1001}, "documents", "a list of 1 to 1000 texts"),
        ({"documents": ["a", "b" * 1024]}, "documents", "document 1 has 1024 tokens, and at most 1023 fit"),
        ({"prompt": "c" * 100, "documents": ["b" * 930]}, "documents", "`behind` has 100"),
        ({"prompt": "", "documents": ["b"]}, "prompt", "empty"),
    ],
)
def test_documents_that_cannot_be_read(
    make_engine: MakeEngine, serve: Serve, body: dict[str, object], param: str, message: str
) -> None:
    server = serve(make_engine())
    answer = server.client.post("/v1/cache/warm", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert message in answer.json()["error"]["message"]
    assert server.stats()["cache"]["chunks"] == 0
