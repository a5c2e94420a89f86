"""A document that one machine has read is found on another at any offset, behind other text."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.fixture_types import MakeEngine
from tests.remote.machines import counts, remote_of, written
from tests.remote.servers import RedisServer, S3Server
from tests.tiny_models import random_ids

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("patient", "approximate_reuse")]
LEAST_SHARE = 0.97


def documents(count: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [random_ids(draw.randint(300, 500), seed=seed * 100 + number) for number in range(count)]


def found_share(engine: Any, start: int, document: list[int], prompt: list[int]) -> float:
    """Of the document's tokens, how many were not read again."""
    result = engine.generate(prompt, max_new_tokens=1, recompute_ratio=0.05)
    end = start + len(document)
    reused = sum(
        max(0, min(span.end, end) - max(span.start, start))
        for span in result.spans
        if span.origin.value != "live"
    )
    return reused / len(document)


@pytest.mark.parametrize("chunk_size", [64, 128])
def test_documents_at_random_offsets(chunk_size: int, redis_server: RedisServer, machine: MakeEngine) -> None:
    """Each stood behind another beginning on A; on B it stands elsewhere."""
    reader = machine(redis_server.url, chunk_size=chunk_size, recompute_ratio=0.05)
    texts = documents(8, seed=chunk_size)
    draw = random.Random(7)
    for number, text in enumerate(texts):
        question = random_ids(40, seed=800 + number)
        reader.warm([*random_ids(draw.randint(0, 300), seed=900 + number), *text, *question])
    written(reader)
    other = machine(redis_server.url, chunk_size=chunk_size, recompute_ratio=0.05)
    shares = []
    for number, text in enumerate(texts):
        other.clear()  # every one comes from the store
        before = random_ids(draw.randint(40, 400), seed=700 + number)
        trips = counts(other)["round_trips"], counts(other)["read_chunks"]
        shares.append(found_share(other, len(before), text, [*before, *text, *random_ids(30, seed=number)]))
        found = counts(other)
        asked = found["round_trips"] - trips[0] - (found["read_chunks"] - trips[1])
        remote_of(other).flush(10.0)
        assert asked >= 1
    assert min(shares) >= LEAST_SHARE, shares


def test_several_documents_in_one_prompt(redis_server: RedisServer, machine: MakeEngine) -> None:
    """As retrieval puts them together, in another order than they were read in."""
    reader = machine(redis_server.url, chunk_size=64)
    texts = documents(4, seed=3)
    for number, text in enumerate(texts):
        reader.warm([*random_ids(50 + 31 * number, seed=number), *text, *random_ids(40, seed=600 + number)])
    written(reader)
    other = machine(redis_server.url, chunk_size=64, recompute_ratio=0.05, remote_write="reused")
    prompt, starts = random_ids(33, seed=77), []
    for text in reversed(texts):
        starts.append(len(prompt))
        prompt += text
    trips = counts(other)["round_trips"]
    result = other.generate([*prompt, *random_ids(20, seed=78)], max_new_tokens=1, recompute_ratio=0.05)
    total = sum(map(len, texts))
    reused = sum(span.end - span.start for span in result.spans if span.origin.value != "live")
    assert reused >= LEAST_SHARE * total
    found = counts(other)
    assert found["round_trips"] - trips == 1 + found["read_chunks"], "one question for all of them"


def test_over_s3(s3: S3Server, machine: MakeEngine) -> None:
    reader = machine(s3.url("anywhere"), chunk_size=128)
    (text,) = documents(1, seed=5)
    reader.warm([*random_ids(50, seed=1), *text])
    written(reader)
    other = machine(s3.url("anywhere"), chunk_size=128, recompute_ratio=0.05)
    before = random_ids(91, seed=2)
    share = found_share(other, len(before), text, [*before, *text, *random_ids(30, seed=3)])
    assert share >= LEAST_SHARE


def test_exact_mode_takes_nothing_that_moved(redis_server: RedisServer, machine: MakeEngine) -> None:
    reader = machine(redis_server.url)
    (text,) = documents(1, seed=6)
    reader.warm(text)
    written(reader)
    other = machine(redis_server.url)
    prompt = [*random_ids(40, seed=1), *text]
    result = other.generate(prompt, max_new_tokens=4, mode="prefix_cache")
    assert result.cached_tokens == 0
    assert counts(other)["read_chunks"] == 0
    assert result.token_ids == other.generate(prompt, max_new_tokens=4, mode="baseline").token_ids
