"""Where a model's KV heads lie in slabs, and how they are gathered into blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.errors import UnsupportedModelError
from kvboost.kv import layout as kv_layout
from kvboost.kv.layout import HeadRange, KVLayout, SlabSpec, head_blocks, probe_layout
from tests.unit.kv.random_kv import LAYOUT, past


def test_the_layout_groups_heads_by_device_dtype_and_head_size() -> None:
    cpu = torch.device("cpu")
    assert LAYOUT.slabs == (SlabSpec(cpu, torch.float32, 4, 11), SlabSpec(cpu, torch.float32, 6, 1))
    ranges = [[(where.slab, where.start, where.end) for where in pair] for pair in LAYOUT.layers]
    assert ranges == [[(0, 0, 2), (0, 2, 4)], [(0, 4, 5), (1, 0, 1)], [(0, 5, 8), (0, 8, 11)]]
    assert LAYOUT.bytes_per_token == (11 * 4 + 6) * 4


def test_dtypes_have_slabs_of_their_own() -> None:
    mixed = ((torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4, dtype=torch.bfloat16)),)
    layout = KVLayout.of(mixed)
    assert [spec.dtype for spec in layout.slabs] == [torch.float32, torch.bfloat16]
    assert layout.bytes_per_token == 4 * 4 + 4 * 2


@given(st.integers(1, 9))
@settings(deadline=None, max_examples=10)
def test_pack_and_unpack_are_inverse(tokens: int) -> None:
    tensors = past(tokens)
    packed = LAYOUT.pack(tensors)
    assert [tuple(part.shape) for part in packed] == [(11, tokens, 4), (1, tokens, 6)]
    assert sum(part.nbytes for part in packed) == tokens * LAYOUT.bytes_per_token
    for pair, wanted in zip(LAYOUT.unpack(packed), tensors, strict=True):
        assert torch.equal(pair[0], wanted[0])
        assert torch.equal(pair[1], wanted[1])


def test_unpacked_tensors_are_views_and_packed_ones_are_not() -> None:
    tensors = past(3)
    packed = LAYOUT.pack(tensors)
    tensors[0][0].zero_()
    unpacked = LAYOUT.unpack(packed)
    assert unpacked[0][0].any()
    packed[0].zero_()
    assert not unpacked[0][0].any()


def test_probing_learns_the_layout_of_a_model(make_llama: Any) -> None:
    layout = probe_layout(make_llama())
    assert layout.slabs == (SlabSpec(torch.device("cpu"), torch.float32, 8, 2 * 2 * 2),)
    assert len(layout.layers) == 2


def test_probing_refuses_a_model_without_a_cache_per_layer(
    make_llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_llama()
    monkeypatch.setattr(model.config, "num_hidden_layers", 3)
    with pytest.raises(UnsupportedModelError, match="2 of 3"):
        probe_layout(model)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=12))
def test_blocks_cover_every_head_once(heads: list[tuple[int, int]]) -> None:
    layout = KVLayout.of(tuple((torch.empty(1, k, 1, 4), torch.empty(1, v, 1, 4)) for k, v in heads))
    seen: list[int] = []
    slab = torch.arange(float(layout.slabs[0].heads)).view(-1, 1, 1).expand(-1, 1, 4)
    for side in (0, 1):
        ranges: list[HeadRange] = [pair[side] for pair in layout.layers]
        blocks = head_blocks(ranges)
        covered = [int(head) for block in blocks for head in block.of(slab)[..., 0, 0].flatten()]
        assert sorted(covered) == [head for where in ranges for head in range(where.start, where.end)]
        assert sum(block.heads for block in blocks) == len(covered)
        seen += covered
    assert sorted(seen) == list(range(layout.slabs[0].heads))


@given(numbers=st.sets(st.integers(0, 200), max_size=30))
def test_runs_of_equal_steps_hold_every_number_once(numbers: set[int]) -> None:
    runs = kv_layout._equal_steps(sorted(numbers))
    assert [number for run in runs for number in run] == sorted(numbers)
