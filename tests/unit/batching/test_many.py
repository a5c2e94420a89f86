"""How large a batch is made for many requests, and which of them run together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.batching.batch_memory import LANE_TOKENS, spill_tokens
from kvboost.batching.many import MAX_SEQUENCES, Job, Size, _sharing
from kvboost.batching.prefixes import sorted_by_tokens
from kvboost.choices import GenerationMode


def request_of(tokens: list[int], new_tokens: int, mode: str = "prefix_cache") -> Any:
    ids = np.array(tokens, dtype=np.int64)
    return SimpleNamespace(
        token_ids=ids,
        limit=len(ids) - 1,
        needed=len(ids) + new_tokens,
        mode=GenerationMode(mode),
        options=SimpleNamespace(max_new_tokens=new_tokens),
    )


@st.composite
def families(draw: st.DrawFn) -> list[list[int]]:
    """Prompts that branch off each other at all kinds of places, sorted."""
    prompts: list[list[int]] = [draw(st.lists(st.integers(0, 3), min_size=1, max_size=60))]
    for _ in range(draw(st.integers(0, 12))):
        base = draw(st.sampled_from(prompts))
        cut = draw(st.integers(0, len(base)))
        prompts.append(base[:cut] + draw(st.lists(st.integers(0, 3), min_size=1, max_size=40)))
    order = sorted_by_tokens([np.array(prompt) for prompt in prompts])
    return [prompts[index] for index in order]


def jobs_of(prompts: list[list[int]], new_tokens: int) -> list[Job[Any]]:
    return [Job(request_of(prompt, new_tokens), []) for prompt in prompts]


@settings(max_examples=200, deadline=None)
@given(families(), st.integers(1, 600), st.integers(1, 700))
def test_a_batch_keeps_its_bound(prompts: list[list[int]], most_slots: int, new_tokens: int) -> None:
    jobs = jobs_of(prompts, new_tokens)
    size = Size.of(jobs, most_slots)
    assert 1 <= size.sequences <= min(MAX_SEQUENCES, len(prompts))
    assert 1 <= size.lane_tokens <= LANE_TOKENS
    assert size.slots <= most_slots
    for job in jobs:
        request = job.request
        if job.in_tree is not None:  # the rest of the prompt and all of the answer but its last token
            assert request.limit - job.in_tree + new_tokens <= size.lane_tokens
            assert size.holds(job) == (job.in_tree <= size.tokens)
        else:
            needed = request.limit + spill_tokens(request, size.lane_tokens)
            assert size.holds(job) == (needed <= size.tokens)


@settings(max_examples=200, deadline=None)
@given(families(), st.integers(1, 700))
def test_with_memory_enough_all_run_at_once(prompts: list[list[int]], new_tokens: int) -> None:
    jobs = jobs_of(prompts, new_tokens)
    size = Size.of(jobs, 10**9)
    assert size.sequences == len(prompts)
    assert all(size.holds(job) for job in jobs)
    spilled = sum(spill_tokens(job.request, size.lane_tokens) for job in jobs)
    assert size.tokens <= sum(map(len, prompts)) + spilled + 16 * len(prompts)


def test_a_shared_prefix_counts_once() -> None:
    prompts = [[7] * 1_000 + [number] * 20 for number in range(16)]
    size = Size.of(jobs_of(prompts, 8), 10**9)
    assert size.tokens < 1_000 + 16 * 20
    assert 27 <= size.lane_tokens <= 32
    jobs = jobs_of(prompts, 8)
    fewer = Size.of(jobs, 1_000 + 300)
    assert 2 <= fewer.sequences < 16
    assert all(fewer.holds(job) for job in jobs)


def test_what_is_repaired_stays_out_of_the_lanes() -> None:
    jobs: list[Job[Any]] = [Job(request_of([number] * 20, 8, "chunk_kv_reuse"), []) for number in (1, 2)]
    Size.of(jobs, 10**9)
    assert [job.in_tree for job in jobs] == [None, None]


@pytest.mark.parametrize("new_tokens", [1, 100, 127, 128, 129, 255, 256, 257, 700])
def test_an_answer_has_room_for_all_its_tokens(new_tokens: int) -> None:
    """A lane takes a pulled end of the prompt, the prompt's last token and all of the answer but its last."""
    for lane in (1, 7, 64, 256):
        request = request_of([5] * 10, new_tokens)
        pulled = max(lane // 2, lane - new_tokens)
        assert spill_tokens(request, lane) + lane >= pulled + new_tokens
        assert spill_tokens(request, lane) % lane == 0


def test_those_that_share_nothing_are_left_out() -> None:
    family = [[5] * 30 + [number, number] for number in range(3)]
    loners = [[100 + number] * 9 for number in range(3)]
    jobs: list[Job[Any]] = [Job(request_of(each, 4), []) for each in [*family, *loners]]
    assert _sharing(jobs) == jobs[:3]
    moved: list[Job[Any]] = [Job(request_of(each, 4, "chunk_kv_reuse"), []) for each in loners]
    assert _sharing(moved) == moved
    assert _sharing([]) == []
