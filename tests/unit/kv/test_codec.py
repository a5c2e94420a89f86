"""Stored KV: its size is known beforehand, any stretch of it lands anywhere, and nothing else is touched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.choices import KVBits
from kvboost.errors import InvalidRequestError, UnstorableKVError
from kvboost.kv.arena import Arena
from kvboost.kv.codec import KeptChunk, KVCodec, StoredKV
from kvboost.kv.layout import KVLayout, Packed
from kvboost.kv.quantize import dequantize_kv, quantize_kv
from kvboost.models import PastKVType, kv_bytes

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
LOSSY: tuple[KVBits, ...] = (8, 4, "k8v4")
ALL: tuple[KVBits, ...] = (16, *LOSSY)
# Around the groups of 32 and 64 tokens.
COUNTS = (1, 2, 3, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 200)

# One layer: (key heads, key head_dim, value heads, value head_dim).
Layer = tuple[int, int, int, int]
LAYOUTS: dict[str, tuple[Layer, ...]] = {
    "plain": ((2, 16, 2, 16),) * 3,
    "one_number": ((1, 1, 1, 1),),
    "odd_head_size": ((2, 5, 2, 5), (2, 5, 2, 5)),
    "keys_and_values_differ": ((2, 24, 2, 20),) * 3,
    "heads_of_keys_and_values_differ": ((4, 8, 1, 8), (4, 8, 1, 8), (1, 8, 4, 8)),
    "layers_differ": ((2, 16, 2, 16), (1, 16, 1, 16), (3, 16, 3, 16), (2, 8, 2, 8), (2, 16, 2, 16)),
    "irregular_heads": ((2, 12, 2, 12), (2, 12, 2, 12), (1, 12, 5, 12), (2, 12, 2, 12), (2, 12, 1, 12)),
    "three_slabs": ((1, 6, 2, 10), (2, 10, 1, 6), (3, 128, 1, 6), (1, 6, 1, 10)),
    "wide": ((1, 128, 1, 96), (1, 128, 1, 192)),
}


def past_of(
    layers: Sequence[Layer],
    tokens: int,
    dtype: torch.dtype | Sequence[torch.dtype] = F32,
    seed: int = 0,
    batch: int = 1,
) -> PastKVType:
    """Random KV with channels of very different size; `dtype` one for all layers, or one each."""
    generator = torch.Generator().manual_seed(seed)
    dtypes = [dtype] * len(layers) if isinstance(dtype, torch.dtype) else list(dtype)

    def random(heads: int, dim: int, kind: torch.dtype) -> torch.Tensor:
        numbers = torch.randn(batch, heads, tokens, dim, generator=generator, dtype=F64)
        sizes = torch.exp(torch.randn(dim, generator=generator, dtype=F64))
        return (numbers * sizes + 3 * torch.randn(dim, generator=generator, dtype=F64)).to(kind)

    return tuple(
        (random(kh, kd, kind), random(vh, vd, kind))
        for (kh, kd, vh, vd), kind in zip(layers, dtypes, strict=True)
    )


def encoded(past: PastKVType, bits: KVBits, device: torch.device | None = None) -> StoredKV:
    codec = KVCodec(KVLayout.of(past), bits, device)
    return codec.encode(codec.layout.pack(past))


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """Room for the order in which sums are rounded, no more."""
    return {
        "rtol": {F16: 2e-3, BF16: 1.6e-2, F32: 1e-5, F64: 1e-12}[dtype],
        "atol": 2e-4 if dtype != F64 else 1e-9,
    }


def same_numbers(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, **tolerance(wanted.dtype))


def storage_bytes(stored: StoredKV) -> int:
    """Bytes that its tensors keep alive."""
    storages = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in stored.tensors}
    return sum(storages.values())


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", ALL)
@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes_for_is_what_is_kept(name: str, bits: KVBits) -> None:
    for tokens in COUNTS:
        stored = encoded(past_of(LAYOUTS[name], tokens), bits)
        assert stored.nbytes == stored.codec.bytes_for(tokens) == storage_bytes(stored), tokens
        found = tuple((tuple(part.shape), part.dtype) for part in stored.tensors)
        assert found == stored.codec.specs(tokens)
        assert stored.tokens == tokens


@pytest.mark.parametrize("device", [None, torch.device("cpu")], ids=["where computed", "cpu"])
@pytest.mark.parametrize("bits", ALL)
def test_what_is_kept_of_views_of_an_arena_holds_nothing_else(
    bits: KVBits, device: torch.device | None
) -> None:
    layout = KVLayout.of(past_of(LAYOUTS["three_slabs"], 1))
    codec = KVCodec(layout, bits, device)
    arena = Arena(layout, 300)
    for slab in arena.slabs:
        slab.normal_()
    for made in (codec.encode(arena.between(7, 47)), codec.encode(arena.gathered(torch.arange(7, 47)))):
        assert storage_bytes(made) == codec.bytes_for(40)
        for part in made.tensors:
            assert part.is_contiguous()
            assert all(
                part.untyped_storage().data_ptr() != s.untyped_storage().data_ptr() for s in arena.slabs
            )
    one, two = (codec.encode(raw) for raw in (arena.between(7, 47), arena.gathered(torch.arange(7, 47))))
    for first, second in zip(one.tensors, two.tensors, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("bits", LOSSY)
@pytest.mark.parametrize("name", LAYOUTS)
def test_more_tokens_never_take_fewer_bytes(name: str, bits: KVBits) -> None:
    codec = KVCodec(KVLayout.of(past_of(LAYOUTS[name], 1)), bits)
    sizes = [codec.bytes_for(tokens) for tokens in range(200)]
    assert sizes[0] == 0
    assert sizes == sorted(sizes)


@pytest.mark.parametrize(("bits", "share"), [(8, 0.55), (4, 0.32), ("k8v4", 0.43)])
def test_a_chunk_of_a_usual_model_shrinks_as_promised(bits: KVBits, share: float) -> None:
    layout = KVLayout.of(past_of(((4, 64, 4, 64),) * 4, 1, F16))
    assert KVCodec(layout, bits).bytes_for(128) <= share * KVCodec(layout, 16).bytes_for(128)


@pytest.mark.parametrize("bits", ALL)
def test_no_tokens(bits: KVBits) -> None:
    stored = encoded(past_of(LAYOUTS["layers_differ"], 0), bits)
    assert stored.nbytes == stored.codec.bytes_for(0) == 0
    assert all(part.shape[1] == 0 for part in stored.decoded())
    arena = Arena(stored.codec.layout, 4)
    stored.place(arena, 2, 0, 0)
    assert all(not slab.any() for slab in arena.slabs)


def test_an_unknown_width_is_refused() -> None:
    layout = KVLayout.of(past_of(LAYOUTS["plain"], 1))
    wrong: list[Any] = [3, 0, 2, 32, True, "8", "k4v8", None, ""]
    for bits in wrong:
        with pytest.raises(InvalidRequestError, match="bits must be"):
            KVCodec(layout, bits)


# --- the same numbers as quantize_kv ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("bits", LOSSY)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_codec_agrees_with_quantize_kv(name: str, bits: KVBits, dtype: torch.dtype) -> None:
    for tokens in (1, 33, 130):
        past = past_of(LAYOUTS[name], tokens, dtype, seed=tokens)
        wanted = dequantize_kv(quantize_kv(past, bits))
        found = encoded(past, bits).past_key_values()
        for pair, wanted_pair in zip(found, wanted, strict=True):
            for tensor, wanted_tensor in zip(pair, wanted_pair, strict=True):
                assert tensor.dtype is dtype
                assert tensor.shape == wanted_tensor.shape
                same_numbers(tensor, wanted_tensor)


@pytest.mark.parametrize("bits", LOSSY)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_first_token_keeps_16_bits(name: str, bits: KVBits) -> None:
    past = past_of(LAYOUTS[name], 40)
    for pair, given_pair in zip(encoded(past, bits).past_key_values(), past, strict=True):
        for tensor, given_tensor in zip(pair, given_pair, strict=True):
            top = given_tensor.abs().amax((-2, -1), keepdim=True)
            error = (tensor - given_tensor)[:, :, :1].abs() / top
            assert float(error.max()) <= 2**-11


@pytest.mark.parametrize(
    ("bits", "key_levels", "value_levels"), [(8, 255, 255), (4, 15, 15), ("k8v4", 255, 15)]
)
def test_errors_stay_within_the_step(bits: KVBits, key_levels: int, value_levels: int) -> None:
    past = past_of(LAYOUTS["irregular_heads"], 90, seed=3)
    for pair, given_pair in zip(encoded(past, bits).past_key_values(), past, strict=True):
        for tensor, wanted, levels in zip(pair, given_pair, (key_levels, value_levels), strict=True):
            spread = float(wanted.abs().max()) * 2
            # A rotation over 4 channels adds up at most twice the half step.
            assert float((tensor - wanted).abs().max()) <= spread / levels * (2 if levels == 15 else 0.51)


def test_layers_of_different_types_keep_their_types() -> None:
    past = past_of(LAYOUTS["plain"], 70, (F32, BF16, F16))
    for bits in LOSSY:
        stored = encoded(past, bits)
        assert storage_bytes(stored) == stored.codec.bytes_for(70)
        for (key, value), (wanted_key, wanted_value) in zip(stored.past_key_values(), past, strict=True):
            assert key.dtype is wanted_key.dtype
            assert value.dtype is wanted_value.dtype
            one = dequantize_kv(quantize_kv(((wanted_key, wanted_value),), bits))
            same_numbers(key, one[0][0])
            same_numbers(value, one[0][1])


@pytest.mark.parametrize("bits", ALL)
def test_encoding_copies_and_leaves_its_input_alone(bits: KVBits) -> None:
    past = past_of(LAYOUTS["layers_differ"], 50)
    codec = KVCodec(KVLayout.of(past), bits)
    raw = codec.layout.pack(past)
    before = [part.clone() for part in raw]
    stored = codec.encode(raw)
    for part, kept in zip(raw, before, strict=True):
        assert torch.equal(part, kept)
    decoded = [part.clone() for part in stored.decoded()]
    for part in raw:
        part.fill_(77.0)
    for part, kept in zip(stored.decoded(), decoded, strict=True):
        assert torch.equal(part, kept)


def test_16_bits_are_as_computed() -> None:
    past = past_of(LAYOUTS["three_slabs"], 50, BF16)
    stored = encoded(past, 16)
    assert not stored.codec.is_lossy
    assert stored.nbytes == kv_bytes(past)
    for pair, given_pair in zip(stored.past_key_values(), past, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(pair, given_pair, strict=True))


@pytest.mark.parametrize("bits", LOSSY)
def test_encoding_what_was_decoded_ten_times_hardly_adds_to_the_error(bits: KVBits) -> None:
    past = past_of(LAYOUTS["plain"], 100, seed=5)
    codec = KVCodec(KVLayout.of(past), bits)
    raw = codec.layout.pack(past)
    errors = []
    now: Packed = raw
    for _ in range(10):
        now = codec.encode(now).decoded()
        errors.append(max(float((a - b).norm() / b.norm()) for a, b in zip(now, raw, strict=True)))
    assert errors[-1] <= 1.25 * errors[0]


# --- placing ---------------------------------------------------------------------------------------


def check_place(stored: StoredKV, start: int, offset: int, end: int, capacity: int, batch: int) -> None:
    """`[offset, end)` stands at `start` in every sequence of the batch, and all else is as it was."""
    arena = Arena(stored.codec.layout, capacity, batch)
    generator = torch.Generator().manual_seed(1)
    for slab in arena.slabs:
        slab.copy_(torch.randn(slab.shape, generator=generator) + 50)
    arena.set_length(3)
    before = [slab.clone() for slab in arena.slabs]
    stored.place(arena, start, offset, end)
    assert arena.length == 3
    stop = start + end - offset
    for slab, old, whole in zip(arena.slabs, before, stored.decoded(), strict=True):
        same_numbers(slab[0, :, start:stop], whole[:, offset:end])
        for sequence in slab[1:]:
            assert torch.equal(sequence[:, start:stop], slab[0, :, start:stop])
        assert torch.equal(slab[:, :, :start], old[:, :, :start])
        assert torch.equal(slab[:, :, stop:], old[:, :, stop:])


@st.composite
def places(draw: st.DrawFn) -> tuple[StoredKV, int, int, int, int, int]:
    layers = LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))]
    tokens = draw(st.integers(1, 150))
    dtype = draw(st.sampled_from((F32, F16, BF16)))
    stored = encoded(past_of(layers, tokens, dtype, seed=tokens), draw(st.sampled_from(ALL)))
    offset = draw(st.integers(0, tokens))
    end = draw(st.integers(offset, tokens))
    start = draw(st.integers(0, 40))
    capacity = max(start + end - offset, 3) + draw(st.integers(0, 9))
    return stored, start, offset, end, capacity, draw(st.integers(1, 3))


@settings(max_examples=120, deadline=None)
@given(places())
def test_any_stretch_lands_anywhere(place: tuple[StoredKV, int, int, int, int, int]) -> None:
    check_place(*place)


@pytest.mark.parametrize("bits", LOSSY)
@pytest.mark.parametrize("name", ["irregular_heads", "three_slabs"])
def test_stretches_around_the_groups(name: str, bits: KVBits) -> None:
    stored = encoded(past_of(LAYOUTS[name], 131), bits)
    edges = (0, 1, 31, 32, 33, 64, 65, 128, 130, 131)
    for offset in edges:
        for end in edges:
            if end > offset:
                check_place(stored, 5, offset, end, 140, 2)


@pytest.mark.parametrize("bits", LOSSY)
def test_pieces_put_together_are_the_whole(bits: KVBits) -> None:
    stored = encoded(past_of(LAYOUTS["three_slabs"], 97), bits)
    arena = Arena(stored.codec.layout, 97)
    for token in range(97):
        stored.place(arena, token, token, token + 1)
    for slab, whole in zip(arena.slabs, stored.decoded(), strict=True):
        same_numbers(slab[0], whole)


@pytest.mark.parametrize("bits", ALL)
@pytest.mark.parametrize("name", LAYOUTS)
def test_decoding_the_first_tokens(name: str, bits: KVBits) -> None:
    stored = encoded(past_of(LAYOUTS[name], 70), bits)
    whole = stored.decoded()
    for count in (0, 1, 2, 31, 32, 33, 63, 64, 65, 69, 70):
        for part, full, spec in zip(stored.decoded(count), whole, stored.codec.layout.slabs, strict=True):
            assert part.shape == (spec.heads, count, spec.head_dim)
            assert part.dtype is spec.dtype
            same_numbers(part, full[:, :count])


@pytest.mark.parametrize("bits", ALL)
def test_every_head_of_an_irregular_layout_comes_back_to_its_place(bits: KVBits) -> None:
    """Every head holds a number of its own, so that a swapped one shows."""
    layout = KVLayout.of(past_of(LAYOUTS["irregular_heads"], 1))
    codec = KVCodec(layout, bits)
    raw = tuple(
        torch.arange(1.0, spec.heads + 1).view(-1, 1, 1).expand(spec.heads, 40, spec.head_dim) * 100
        for spec in layout.slabs
    )
    for part, wanted in zip(codec.encode(raw).decoded(), raw, strict=True):
        torch.testing.assert_close(part, wanted.contiguous(), rtol=2e-3, atol=0)


# --- KV that cannot be held ------------------------------------------------------------------------


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("bits", LOSSY)
def test_kv_that_is_not_finite_is_refused(bits: KVBits, number: float) -> None:
    for dtype in (F32, F16, BF16):
        for layer in range(5):
            for side in (0, 1):
                for token in (0, 69):
                    past = past_of(LAYOUTS["layers_differ"], 70, dtype)
                    past[layer][side][0, -1, token, -1] = number
                    with pytest.raises(UnstorableKVError, match=r"^not finite$"):
                        encoded(past, bits)


def test_16_bits_hold_what_is_not_finite() -> None:
    past = past_of(LAYOUTS["plain"], 20)
    past[1][0][0, 0, 5, 3] = math.nan
    assert bool(encoded(past, 16).past_key_values()[1][0].isnan().any())


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("bits", LOSSY)
def test_the_largest_numbers_that_are_taken_stay_finite(bits: KVBits, dtype: torch.dtype) -> None:
    top = torch.finfo(dtype).max / (1 if dtype is F16 else 16)
    for token in (0, 1, 40):
        past = past_of(((1, 16, 1, 16),), 70, dtype)
        for tensor in past[0]:
            tensor[0, 0, token, 3] = top
            tensor[0, 0, token, 5] = -top
        for tensor in encoded(past, bits).past_key_values()[0]:
            assert bool(torch.isfinite(tensor).all())


@pytest.mark.parametrize("bits", LOSSY)
def test_zeros_and_equal_numbers_come_back(bits: KVBits) -> None:
    for number in (0.0, 1.0, -3.0, 1e-30):
        past = tuple((torch.full((1, 2, 40, 16), number),) * 2 for _ in range(2))
        for pair in encoded(past, bits).past_key_values():
            for tensor, is_rotated in zip(pair, (bits == 4, bits != 8), strict=True):
                # Rotating 16 equal numbers gives one of four times the size and zeros.
                allowed = 4 / 15 / 2 / 4 if is_rotated else 1e-3
                torch.testing.assert_close(tensor, torch.full_like(tensor, number), rtol=allowed, atol=0)


# --- chunks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", ALL)
def test_a_kept_chunk_decodes_when_it_is_read(bits: KVBits) -> None:
    past = past_of(LAYOUTS["keys_and_values_differ"], 33)
    stored = encoded(past, bits)
    chunk = KeptChunk(
        stored, chunk_id="a" * 64, text="", token_ids=list(range(33)), position_start=5, position_end=38
    )
    assert chunk.memory_bytes() == stored.nbytes
    assert chunk.length == 33
    assert f"{stored.nbytes / 1e6:.2f} MB" in repr(chunk)
    assert [(k.shape, v.shape) for k, v in chunk.past_key_values] == [(k.shape, v.shape) for k, v in past]
    for pair, wanted in zip(chunk.past_key_values, dequantize_kv(quantize_kv(past, bits)), strict=True):
        same_numbers(pair[0], wanted[0])
        same_numbers(pair[1], wanted[1])
    if bits != 16:
        chunk.past_key_values[0][0].fill_(7.0)  # a copy: what is kept does not change
        same_numbers(chunk.past_key_values[0][0], dequantize_kv(quantize_kv(past, bits))[0][0])


@pytest.mark.parametrize("bits", LOSSY)
def test_only_the_first_sequence_of_a_batch_is_read_and_every_one_is_written(bits: KVBits) -> None:
    past = past_of(LAYOUTS["three_slabs"], 30, batch=1)
    stored = encoded(past, bits)
    arena = Arena(stored.codec.layout, 40, batch=3)
    stored.place(arena, 4, 10, 30)
    arena.set_length(24)
    for layer, (key, value) in enumerate(stored.past_key_values()):
        for sequence in range(3):
            same_numbers(arena.layers[layer].keys[sequence, :, 4:], key[0, :, 10:])
            same_numbers(arena.layers[layer].values[sequence, :, 4:], value[0, :, 10:])
