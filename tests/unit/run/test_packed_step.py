"""Sequences in one arena: the logits and KV of each are those that the model gives it alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.kernels import packed
from kvboost.kernels.partial import partial_attention
from kvboost.kv.arena import Arena
from kvboost.kv.layout import probe_layout
from kvboost.run import decode, packed_step
from kvboost.run.packed_step import Extension, PackedModel, Segment, SequenceKV
from tests.tiny_models import ARCHITECTURES, random_ids, tiny_model

TOLERANCE = 2e-4


def _alone(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0]


def _run(model: Any, arena: Arena, extensions: list[Extension]) -> dict[int, torch.Tensor]:
    found: dict[int, list[torch.Tensor]] = {}
    with decode.running(model, fast=True):
        for forward in PackedModel(model, arena).extend(extensions):
            for index, _first, logits in forward:
                found.setdefault(index, []).append(logits)
    return {index: torch.cat(parts) for index, parts in found.items()}


def _ids(count: int, seed: int) -> np.ndarray:
    return np.asarray(random_ids(count, seed), dtype=np.int64)


def _can_run(model: Any, layout: Any) -> bool:
    return packed_step.can_run(model, Arena(layout, 4))


@pytest.mark.parametrize("attention", ["own", "eager"])
@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_sequences_behind_shared_segments_give_the_single_logits(name: str, attention: str) -> None:
    """A tree: all share a root, two sequences a branch; then single tokens of sequences of unequal length."""
    model = tiny_model(name)
    if attention == "eager":
        model.set_attn_implementation("eager")
    layout = probe_layout(model)
    if not _can_run(model, layout):
        pytest.skip(
            f"{name} has attention classes of its own in this transformers; its sequences run one by one"
        )
    arena = Arena(layout, 300)
    root_ids, branch_ids = _ids(50, 1), _ids(30, 2)
    tails = [_ids(n, 10 + n) for n in (1, 7, 25, 12)]
    root = Segment(0, 50)
    branch = Segment(50, 30, (root,))
    lanes = [
        Segment(100 + 40 * i, 40, (root, branch) if i in (1, 2) else (root,), clean=True) for i in range(4)
    ]
    _run(model, arena, [Extension(root, root_ids, 0)])
    _run(model, arena, [Extension(branch, branch_ids, 0)])
    got = _run(
        model, arena, [Extension(lane, tail, len(tail)) for lane, tail in zip(lanes, tails, strict=True)]
    )
    texts = [
        np.concatenate([root_ids, branch_ids, tail] if i in (1, 2) else [root_ids, tail]).tolist()
        for i, tail in enumerate(tails)
    ]
    for i, text in enumerate(texts):
        expected = _alone(model, text)[-len(tails[i]) :]
        assert torch.allclose(got[i], expected, atol=TOLERANCE), (name, i)
    for step in range(3):
        token = [_ids(1, 100 + 10 * step + i) for i in range(4)]
        chosen = range(4) if step != 1 else (0, 2, 3)  # a sequence that pauses
        got = _run(model, arena, [Extension(lanes[i], token[i]) for i in chosen])
        for order, i in enumerate(chosen):
            texts[i] += token[i].tolist()
            assert torch.allclose(got[order], _alone(model, texts[i])[-1:], atol=TOLERANCE), (name, step, i)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_mixture_of_prompts_and_single_tokens(data: st.DataObject) -> None:
    model = _model()
    layout = probe_layout(model)
    arena = Arena(layout, 400)
    shared = data.draw(st.integers(0, 30))
    before: tuple[Segment, ...] = ()
    texts: list[list[int]] = []
    if shared:
        root = Segment(0, shared)
        before = (root,)
        _run(model, arena, [Extension(root, _ids(shared, 3), 0)])
    count = data.draw(st.integers(1, 5))
    clean = data.draw(st.booleans())
    lanes = [Segment(40 + 60 * i, 60, before, clean=clean) for i in range(count)]
    texts = [_ids(shared, 3).tolist() if shared else [] for _ in lanes]
    for step in range(data.draw(st.integers(1, 4))):
        chosen = data.draw(st.lists(st.sampled_from(range(count)), min_size=1, unique=True))
        extensions = []
        for i in chosen:
            fresh = _ids(data.draw(st.integers(1, 12)), 50 * step + i)
            texts[i] += fresh.tolist()
            extensions.append(Extension(lanes[i], fresh, data.draw(st.integers(0, len(fresh)))))
        got = _run(model, arena, extensions)
        for order, (i, extension) in enumerate(zip(chosen, extensions, strict=True)):
            if extension.wanted:
                expected = _alone(model, texts[i])[-extension.wanted :]
                assert torch.allclose(got[order], expected, atol=TOLERANCE)


@pytest.mark.parametrize("queries", [7, 16, 64])
@pytest.mark.parametrize("name", ["mistral", "gemma3", "qwen2_sliding", "phi3"])
def test_windows_in_small_blocks(name: str, queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of 40 tokens over stretches of 130, own and shared, in blocks of queries and of tokens."""
    monkeypatch.setattr(packed, "_WINDOW_QUERIES", queries)
    monkeypatch.setattr(packed_step, "_MAX_TOKENS", {False: 61, True: 61})
    model = tiny_model(name)
    arena = Arena(probe_layout(model), 700)
    root_ids = _ids(130, 1)
    root = Segment(0, 130)
    _run(model, arena, [Extension(root, root_ids, 0)])
    tails = [_ids(n, n) for n in (90, 3, 41)]
    lanes = [Segment(140 + 100 * i, 100, (root,)) for i in range(3)]
    got = _run(
        model, arena, [Extension(lane, tail, len(tail)) for lane, tail in zip(lanes, tails, strict=True)]
    )
    for i, tail in enumerate(tails):
        expected = _alone(model, [*root_ids.tolist(), *tail.tolist()])[-len(tail) :]
        assert torch.allclose(got[i], expected, atol=TOLERANCE)


def test_long_extensions_go_through_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounded tokens and bounded logits per forward change nothing."""
    model = _model()
    arena = Arena(probe_layout(model), 400)
    monkeypatch.setattr(packed_step, "_MAX_TOKENS", {False: 16, True: 16})
    monkeypatch.setattr(packed_step, "_MAX_LOGITS", 5 * int(model.config.vocab_size))
    ids = [_ids(50, 1), _ids(33, 2), _ids(3, 3)]
    lanes = [Segment(100 * i, 100) for i in range(3)]
    got = _run(
        model, arena, [Extension(lane, each, len(each)) for lane, each in zip(lanes, ids, strict=True)]
    )
    for i, each in enumerate(ids):
        assert torch.allclose(got[i], _alone(model, each.tolist()), atol=TOLERANCE)
    assert [lane.length for lane in lanes] == [50, 33, 3]


def test_a_sequences_kv_is_found_wherever_it_lies() -> None:
    model = _model()
    layout = probe_layout(model)
    arena = Arena(layout, 100)
    root = Segment(0, 20)
    lane = Segment(50, 30, (root,))
    ids = _ids(35, 5)
    _run(model, arena, [Extension(root, ids[:20], 0)])
    _run(model, arena, [Extension(lane, ids[20:])])
    plain = Arena(layout, 35)
    decode.prefill(model, ids, plain, 35)
    for start, end in ((0, 35), (3, 19), (15, 25), (20, 35), (30, 31)):
        for ours, theirs in zip(
            SequenceKV(arena, lane).between(start, end), plain.between(start, end), strict=True
        ):
            assert torch.allclose(ours, theirs, atol=TOLERANCE)


def test_a_segment_takes_no_more_than_it_has_room_for() -> None:
    model = _model()
    arena = Arena(probe_layout(model), 20)
    with pytest.raises(ValueError, match="a segment of 4 tokens cannot take 5"):
        _run(model, arena, [Extension(Segment(0, 4), _ids(5, 1))])


def test_nothing_is_read_behind_a_segment_that_is_not_clean() -> None:
    """Single tokens of segments of unequal length: one ends with the arena, another has NaN behind it."""
    model = _model()
    arena = Arena(probe_layout(model), 100)
    texts = [_ids(7, 1), _ids(5, 2), _ids(3, 3)]
    segments = [Segment(65, 7), Segment(81, 5), Segment(97, 3)]
    _run(model, arena, [Extension(one, ids[:-1]) for one, ids in zip(segments, texts, strict=True)])
    for slab in arena.slabs:
        slab[:, :, 86:97] = float("nan")  # what is left of a text that overflowed
    got = _run(model, arena, [Extension(one, ids[-1:]) for one, ids in zip(segments, texts, strict=True)])
    for index, ids in enumerate(texts):
        assert torch.allclose(got[index], _alone(model, ids.tolist())[-1:], atol=TOLERANCE)


def test_lanes_go_together_where_they_may_be_read() -> None:
    """The tokens of clean lanes in equal steps are one call; a segment that is not clean has its own."""

    def feed(start: int, length: int, room: int) -> packed.Feed:
        return packed.Feed(packed.Stretch(start, length, 0), 1, (), room)

    def sizes(*feeds: packed.Feed) -> list[int]:
        return [len(each.owns) for each in packed.PackedAttention(feeds, torch.device("cpu"), {})._lanes]

    assert sizes(feed(0, 3, 40), feed(40, 9, 40), feed(80, 1, 40)) == [3]
    assert sizes(feed(0, 3, 3), feed(40, 9, 40), feed(80, 1, 40)) == [1, 2]
    assert sizes(feed(0, 9, 9), feed(40, 3, 40), feed(80, 10, 40)) == [2, 1]
    assert sizes(feed(0, 3, 40), feed(40, 9, 40), feed(90, 1, 40)) == [2, 1]
    assert sizes(feed(80, 3, 40), feed(0, 9, 40), feed(40, 1, 40)) == [3], "in whatever order they come"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_in_parts_equals_the_whole(dtype: torch.dtype, causal: bool, masked: bool) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, 9, 16, dtype=dtype) for _ in range(3))
    mask = (
        torch.where(torch.rand(2, 1, 9, 9) < 0.3, torch.finfo(dtype).min, 0.0).to(dtype) if masked else None
    )
    if mask is not None:
        mask[:, :, :, 0] = 0
    part, sums = partial_attention(query, key, value, mask, 0.3, causal=causal)
    scores = query.float() @ key.float().transpose(2, 3) * 0.3
    if mask is not None:
        scores += mask.float()
    if causal:
        scores += torch.full((9, 9), float("-inf")).triu(1)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    assert torch.allclose(sums, scores.logsumexp(-1), atol=tolerance)
    assert torch.allclose(part.float(), scores.softmax(-1) @ value.float(), atol=tolerance)


@pytest.mark.parametrize("causal", [False, True])
def test_parts_share_heads(causal: bool) -> None:
    torch.manual_seed(1)
    query, key, value = torch.randn(1, 6, 5, 16), torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16)
    part, sums = partial_attention(query, key, value, None, 0.25, causal=causal)
    wide = partial_attention(
        query, key.repeat_interleave(3, 1), value.repeat_interleave(3, 1), None, 0.25, causal=causal
    )
    torch.testing.assert_close((part, sums), tuple(wide))


def _model() -> Any:
    return tiny_model("llama")
