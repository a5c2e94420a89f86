"""Chunks, results and hashes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import operator
import struct
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.choices import Origin
from kvboost.models import (
    AssembledPrompt,
    CachedChunk,
    GenerationResult,
    ScoreResult,
    Span,
    WarmResult,
    chained_hash,
    chained_hash_from_bytes,
    content_hash_from_tokens,
    kv_bytes,
    token_bytes,
)

token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=20)


def a_chunk(tokens: int = 3, **changes: object) -> CachedChunk:
    pair = (torch.zeros(1, 2, tokens, 4), torch.zeros(1, 2, tokens, 4, dtype=torch.bfloat16))
    values: dict[str, object] = {
        "chunk_id": "0123456789abcdef",
        "text": "text",
        "token_ids": list(range(tokens)),
        "past_key_values": (pair, pair),
        "position_start": 10,
        "position_end": 10 + tokens,
    }
    return CachedChunk(**{**values, **changes})  # type: ignore[arg-type]


@given(token_lists)
@settings(deadline=None, max_examples=50)
def test_content_hash_is_sha256_of_little_endian_words(ids: list[int]) -> None:
    raw = b"".join(struct.pack("<I", token) for token in ids)
    assert token_bytes(ids) == raw
    assert content_hash_from_tokens(ids) == hashlib.sha256(raw).hexdigest()


@given(token_lists, st.one_of(st.none(), st.text(alphabet="0123456789abcdef", max_size=64)))
@settings(deadline=None, max_examples=50)
def test_chained_hash_starts_with_the_parent_as_text(ids: list[int], parent: str | None) -> None:
    raw = b"".join(struct.pack("<I", token) for token in ids)
    wanted = hashlib.sha256((parent if parent else "root").encode("utf-8") + raw).hexdigest()
    assert chained_hash(ids, parent) == wanted
    assert chained_hash_from_bytes(raw, parent) == wanted


def test_hashes_take_lists_tuples_and_arrays_alike() -> None:
    wanted = content_hash_from_tokens([1, 70_000, 3])
    assert content_hash_from_tokens((1, 70_000, 3)) == wanted
    for dtype in (np.int64, np.int32, np.uint32):
        assert content_hash_from_tokens(np.array([1, 70_000, 3], dtype=dtype)) == wanted
        assert chained_hash(np.array([1, 70_000, 3], dtype=dtype), "p") == chained_hash([1, 70_000, 3], "p")


def test_same_tokens_under_other_parents_have_other_keys() -> None:
    keys = {chained_hash([1, 2], parent) for parent in (None, "aa", "bb", chained_hash([1, 2]))}
    assert len(keys) == 4
    assert chained_hash([1, 2], "") == chained_hash([1, 2], None)


@pytest.mark.parametrize("bad", [[-1], [2**32]])
def test_ids_that_do_not_fit_four_bytes_are_not_hashed_as_others(bad: list[int]) -> None:
    with pytest.raises(OverflowError):
        token_bytes(bad)


def test_kv_bytes_counts_every_tensor() -> None:
    key = torch.zeros(1, 2, 3, 4, dtype=torch.float32)
    value = torch.zeros(1, 2, 3, 8, dtype=torch.bfloat16)
    assert kv_bytes(((key, value), (key, value))) == 2 * (2 * 3 * 4 * 4 + 2 * 3 * 8 * 2)
    assert kv_bytes(()) == 0


def test_chunk_length_touch_and_memory() -> None:
    before = time.time()
    chunk = a_chunk()
    assert before <= chunk.created_at <= time.time()
    assert chunk.length == 3
    chunk.touch()
    chunk.touch()
    assert chunk.access_count == 2
    assert chunk.memory_bytes() == 2 * (2 * 3 * 4 * 4 + 2 * 3 * 4 * 2)


def test_chunk_repr_shows_id_positions_length_size_and_hits() -> None:
    pair = (torch.zeros(1, 1, 1000, 250), torch.zeros(1, 1, 1000, 250))
    chunk = a_chunk(1000, past_key_values=(pair,), access_count=7)
    shown = repr(chunk)
    assert "01234567" in shown
    assert "012345678" not in shown
    assert "10-1010" in shown
    assert "1000 tokens" in shown
    assert "2.00 MB" in shown
    assert "7 hits" in shown


def test_chunks_are_compared_by_identity() -> None:
    # comparing fields would compare tensors, which have no single truth value
    first, second = a_chunk(), a_chunk()
    assert first != second
    assert len({first, second}) == 2


def test_warm_result_is_an_int_and_a_truth() -> None:
    some = WarmResult(3, 40, 16, False, 8, "tail")
    none = WarmResult(0, 5, 16, False, 5)
    assert some
    assert not none
    assert int(some) == 3
    assert operator.index(some) == 3
    assert list(range(some)) == [0, 1, 2]
    assert none.alignment_warning is None


def test_warm_result_repr_says_aligned_or_the_tail() -> None:
    assert "aligned" in repr(WarmResult(2, 32, 16, True, 0))
    shown = repr(WarmResult(3, 40, 16, False, 8))
    assert "aligned" not in shown
    assert "8" in shown
    assert "40" in shown
    assert "evicted" not in shown
    assert "5 evicted" in repr(WarmResult(3, 40, 16, False, 8, evicted_chunks=5))


SPANS = (
    Span(0, 6, Origin.EXACT),
    Span(6, 8, Origin.RECOMPUTED),
    Span(8, 15, Origin.APPROXIMATE),
    Span(15, 20, Origin.LIVE),
)


def a_result(generated: int = 5, ttft_ms: float = 100.0, total_ms: float = 500.0) -> GenerationResult:
    return GenerationResult(
        "chunk_kv_reuse", "p", "o", generated, ttft_ms, total_ms, 10.0, 0.75, 20, 15, spans=SPANS,
        recomputed_tokens=2,
    )  # fmt: skip


def test_what_came_from_the_cache_in_numbers() -> None:
    result = a_result()
    assert (result.exact_tokens, result.approximate_tokens, result.saved_tokens) == (6, 7, 13)
    assert result.saved_tokens == result.cached_tokens - result.recomputed_tokens
    score = ScoreResult("chunk_kv_reuse", "p", "c", -1.0, True, [1], [-1.0], 9.0, 0.75, 20, 15, SPANS)
    assert (score.exact_tokens, score.approximate_tokens, score.saved_tokens) == (6, 7, 13)
    without_spans = GenerationResult("prefix_cache", "p", "o", 5, 1.0, 2.0, 10.0, 0.5, 20, 10)
    assert (without_spans.exact_tokens, without_spans.saved_tokens) == (10, 10)


def test_the_speed_behind_the_first_token() -> None:
    assert a_result().decode_tokens_per_sec == pytest.approx(10.0)
    assert a_result(generated=1).decode_tokens_per_sec == 0.0
    assert a_result(generated=0).decode_tokens_per_sec == 0.0
    assert a_result(ttft_ms=500.0).decode_tokens_per_sec == 0.0


def test_a_result_as_plain_data() -> None:
    document = json.loads(json.dumps(a_result().to_dict()))
    assert (document["exact_tokens"], document["approximate_tokens"], document["saved_tokens"]) == (6, 7, 13)
    assert document["decode_tokens_per_sec"] == pytest.approx(10.0)
    assert document["spans"][2]["origin"] == "approximate"


def test_warm_result_and_span_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        WarmResult(1, 1, 1, True, 0).chunks_stored = 2  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Span(0, 1, Origin.LIVE).start = 1  # type: ignore[misc]


def test_span_and_prompt_lengths() -> None:
    assert Span(3, 10, Origin.EXACT).length == 7
    prompt = AssembledPrompt([1, 2, 3], None, 0, [1, 2, 3], [0, 1, 2], [], 0.0)
    assert prompt.total_length == 3
    assert not prompt.has_approximate
    assert prompt.runs == ()


def test_results_do_not_share_their_lists() -> None:
    def result() -> GenerationResult:
        return GenerationResult("baseline", "", "", 0, 0.0, 0.0, 0.0, 0.0, 1, 0)

    result().token_ids.append(1)
    assert result().token_ids == []


def test_enums_are_their_strings() -> None:
    assert [origin.value for origin in Origin] == ["exact", "approximate", "recomputed", "live"]
    assert Origin("live") is Origin.LIVE
    assert Origin.LIVE == "live"
