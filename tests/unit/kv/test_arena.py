"""The arena behaves like transformers' DynamicCache, without concatenating."""

from __future__ import annotations

import itertools
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from kvboost.compat import CROP_ZERO_EMPTIES
from kvboost.kv import arena as arena_module
from kvboost.kv.arena import Arena
from kvboost.kv.codec import KVCodec
from kvboost.kv.layout import Packed, probe_layout
from kvboost.models import PastKVType
from tests.unit.kv.random_kv import LAYOUT, SHAPES, past

CODEC = KVCodec(LAYOUT)


def feed(cache: Any, tensors: PastKVType) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Give every layer its new keys and values, as a forward does."""
    return [cache.update(key, value, layer) for layer, (key, value) in enumerate(tensors)]


def crop_last(cache: Any, tokens: int) -> None:
    cache.crop(-tokens)


def same(arena: Arena, dynamic: DynamicCache) -> None:
    assert arena.get_seq_length() == dynamic.get_seq_length()
    assert arena.length == dynamic.get_seq_length()
    if dynamic.get_seq_length() == 0:
        return
    for mine, theirs in zip(arena.layers, dynamic.layers, strict=True):
        assert torch.equal(mine.keys, theirs.keys)
        assert torch.equal(mine.values, theirs.values)


# --- writing ---------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(1, 12), st.integers(1, 2))
@settings(deadline=None, max_examples=30)
def test_appending_equals_dynamic_cache_and_grows_where_it_must(
    pieces: list[int], capacity: int, batch: int
) -> None:
    arena, dynamic = Arena(LAYOUT, capacity, batch), DynamicCache()
    for seed, tokens in enumerate(pieces):
        mine = feed(arena, past(tokens, batch, seed))
        theirs = feed(dynamic, past(tokens, batch, seed))
        for one, two in zip(mine, theirs, strict=True):
            assert torch.equal(one[0], two[0])
            assert torch.equal(one[1], two[1])
    same(arena, dynamic)
    assert arena.capacity >= sum(pieces)


def test_appending_writes_in_place() -> None:
    arena = Arena(LAYOUT, 8)
    feed(arena, past(3))
    before = [slab.data_ptr() for slab in arena.slabs]
    (keys, _), *_ = feed(arena, past(5, seed=1))
    assert [slab.data_ptr() for slab in arena.slabs] == before
    assert keys.data_ptr() == arena.slabs[0].data_ptr(), "what attention gets is a view"
    feed(arena, past(1, seed=2))
    assert arena.capacity > 8
    assert arena.length == 9


def test_unwritten_positions_are_zero_also_after_growing() -> None:
    arena = Arena(LAYOUT, 4)
    feed(arena, past(3))
    arena.grow(20)
    assert arena.capacity == 20
    for slab in arena.slabs:
        assert slab[:, :, :3].any()
        assert not slab[:, :, 3:].any()


def test_each_layer_keeps_its_own_length_while_a_forward_runs() -> None:
    arena = Arena(LAYOUT, 8)
    key, value = past(3)[0]
    arena.update(key, value, 0)
    assert arena.layers[0].get_seq_length() == 3
    assert arena.length == 0, "not all layers have them yet"


@given(st.permutations(range(6)), st.integers(1, 6))
@settings(deadline=None, max_examples=30)
def test_scattering_writes_at_given_positions(order: list[int], count: int) -> None:
    arena = Arena(LAYOUT, 8)
    base, new = past(6), past(count, seed=9)
    feed(arena, base)
    positions = torch.tensor(order[:count])
    with arena.scatter_at(positions):
        written = feed(arena, new)
    assert arena.length == 6
    for layer in range(len(SHAPES)):
        for part in (0, 1):
            wanted = base[layer][part].clone()
            wanted[:, :, positions] = new[layer][part]
            assert torch.equal(written[layer][part], wanted)
            assert torch.equal(arena.as_past_key_values()[layer][part], wanted)


def test_scattering_ends_with_its_block_also_after_an_error() -> None:
    arena = Arena(LAYOUT, 8)
    feed(arena, past(4))
    with pytest.raises(RuntimeError, match="halfway"), arena.scatter_at(torch.tensor([0])):
        raise RuntimeError("halfway")
    feed(arena, past(2))
    assert arena.length == 6


# --- placing and extracting ------------------------------------------------------------------


@given(st.integers(0, 5), st.integers(1, 5))
@settings(deadline=None, max_examples=20)
def test_what_was_placed_is_extracted(start: int, tokens: int) -> None:
    arena = Arena(LAYOUT, 10)
    packed = LAYOUT.pack(past(tokens))
    CODEC.encode(packed).place(arena, start, 0, tokens)
    arena.set_length(start + tokens)
    for part, wanted in zip(arena.between(start, start + tokens), packed, strict=True):
        assert torch.equal(part, wanted)
    for pair, wanted_pair in zip(arena.as_past_key_values(), past(tokens), strict=True):
        assert torch.equal(pair[0][:, :, start:], wanted_pair[0])
        assert torch.equal(pair[1][:, :, start:], wanted_pair[1])
        assert not pair[0][:, :, :start].any()


def test_kept_parts_keep_no_larger_storage_alive() -> None:
    arena = Arena(LAYOUT, 100)
    feed(arena, past(50))
    parts: Packed = CODEC.encode(arena.between(10, 14)).tensors
    assert sum(part.untyped_storage().nbytes() for part in parts) == 4 * LAYOUT.bytes_per_token
    wanted = [part.clone() for part in parts]
    for slab in arena.slabs:
        slab.zero_()
    assert all(torch.equal(part, copy) for part, copy in zip(parts, wanted, strict=True))


def test_placing_fills_all_sequences_of_a_batch() -> None:
    arena = Arena(LAYOUT, 8, batch=3)
    CODEC.encode(LAYOUT.pack(past(4))).place(arena, 0, 0, 4)
    arena.set_length(4)
    for pair, wanted in zip(arena.as_past_key_values(), past(4), strict=True):
        assert torch.equal(pair[0], wanted[0].expand(3, -1, -1, -1))
    assert arena.batch == 3


@pytest.mark.parametrize("length", [-1, 9])
def test_a_length_outside_the_capacity_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="capacity 8"):
        Arena(LAYOUT, 8).set_length(length)


# --- what generation does to caches ----------------------------------------------------------


@pytest.mark.parametrize("removed", [1, 4, 6])
def test_cropping_equals_dynamic_cache(removed: int) -> None:
    arena, dynamic = Arena(LAYOUT, 8), DynamicCache()
    for cache in (arena, dynamic):
        feed(cache, past(7))
        crop_last(cache, removed)
    same(arena, dynamic)
    for cache in (arena, dynamic):
        feed(cache, past(2, seed=5))
    same(arena, dynamic)


def test_cropping_by_zero_equals_dynamic_cache() -> None:
    arena, dynamic = Arena(LAYOUT, 8), DynamicCache()
    for cache in (arena, dynamic):
        feed(cache, past(7))
        cache.crop(0)
    assert arena.length == dynamic.get_seq_length() == (0 if CROP_ZERO_EMPTIES else 7)


def test_cropping_to_a_length_keeps_that_many() -> None:
    arena = Arena(LAYOUT, 8)
    feed(arena, past(7))
    arena.crop(9)
    assert arena.length == 7
    arena.crop(5)
    assert arena.length == 5
    if CROP_ZERO_EMPTIES:
        dynamic = DynamicCache()
        feed(dynamic, past(7))
        dynamic.crop(5)
        same(arena, dynamic)


def test_cropping_by_more_than_there_is_empties() -> None:
    arena = Arena(LAYOUT, 8)
    feed(arena, past(3))
    crop_last(arena, 5)
    assert arena.length == 0


def test_batch_changes_equal_dynamic_cache() -> None:
    arena, dynamic = Arena(LAYOUT, 6, batch=2), DynamicCache()
    for cache in (arena, dynamic):
        feed(cache, past(4, batch=2))
        cache.batch_repeat_interleave(2)
        feed(cache, past(1, batch=4, seed=2))
    same(arena, dynamic)
    for cache in (arena, dynamic):
        cache.reorder_cache(torch.tensor([3, 0, 0, 2]))
    same(arena, dynamic)
    for cache in (arena, dynamic):
        feed(cache, past(2, batch=4, seed=3))
        cache.batch_select_indices(torch.tensor([1]))
    same(arena, dynamic)
    assert arena.batch == 1
    for cache in (arena, dynamic):
        feed(cache, past(1, seed=4))
    same(arena, dynamic)


def test_reset_empties() -> None:
    arena = Arena(LAYOUT, 8)
    feed(arena, past(5))
    arena.reset()
    assert arena.length == arena.get_seq_length() == 0
    feed(arena, past(2, seed=1))
    dynamic = DynamicCache()
    feed(dynamic, past(2, seed=1))
    same(arena, dynamic)


def test_mask_sizes_come_from_length_and_query_in_both_dialects() -> None:
    arena = Arena(LAYOUT, 8)
    feed(arena, past(5))
    layer = arena.layers[0]
    assert layer.get_mask_sizes(3) == (8, 0)
    assert layer.get_mask_sizes(torch.arange(5, 8)) == (8, 0)
    assert layer.get_max_length() == layer.get_max_cache_shape() == -1
    layer.lazy_initialization(torch.zeros(1))
    layer.lazy_initialization(torch.zeros(1), torch.zeros(1))
    assert layer.length == 5


def test_bytes_are_those_of_the_slabs() -> None:
    assert Arena(LAYOUT, 10, batch=2).nbytes == 2 * 10 * LAYOUT.bytes_per_token


@pytest.mark.parametrize("cuts", [(0, 11), (0, 4, 11), (0, 1, 2, 10, 11)])
def test_a_model_reads_from_the_arena_what_it_reads_from_dynamic_cache(
    make_llama: Any, cuts: tuple[int, ...]
) -> None:
    model = make_llama()
    ids = torch.arange(11).unsqueeze(0) * 13 % 300
    arena, dynamic = Arena(probe_layout(model), 11), DynamicCache()
    with torch.no_grad():
        for start, end in itertools.pairwise(cuts):
            one = model(input_ids=ids[:, start:end], past_key_values=arena, use_cache=True).logits
            two = model(input_ids=ids[:, start:end], past_key_values=dynamic, use_cache=True).logits
            assert torch.equal(one, two)
    same(arena, dynamic)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_arenas_take_memory_as_they_are_filled(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_module, "_MANY_BYTES", 1)
    slab = arena_module._zeros((1, 3, 100, 8), dtype, torch.device("cpu"))
    assert (slab.shape, slab.dtype, slab.is_contiguous()) == ((1, 3, 100, 8), dtype, True)
    assert slab.data_ptr() % 64 == 0
    assert not slab.any()
    slab.fill_(1.0)
    assert slab.sum() == 2_400
    monkeypatch.undo()
    before = psutil.Process().memory_info().rss
    large = arena_module._zeros((1, 4, 1 << 20, 32), dtype, torch.device("cpu"))  # 256 MB or more
    assert large.nbytes >= 1 << 28
    large[:, :, :10] = 1.0
    assert psutil.Process().memory_info().rss - before < large.nbytes // 4
