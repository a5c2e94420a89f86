"""Chunks as bytes and back: every width and type, and nothing damaged is taken for a chunk."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.choices import BITS, KVBits
from kvboost.disk import serde
from kvboost.disk.serde import Record, RecordHeader, buffer_of, header_size, read_header, to_record
from kvboost.errors import CacheFileError
from kvboost.kv.codec import KeptChunk, KVCodec, StoredKV
from kvboost.kv.layout import KVLayout
from kvboost.models import CachedChunk, CompositeChunk, chained_hash, content_hash_from_tokens
from tests.unit.fake_kv import user_chunk

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SHAPES = ((1, 2), (2, 3), (3, 64), (2, 128))  # (kv_heads, head_dim) of each layer
FIXED = struct.Struct("<8sIIIIQ16s")


def random_kv(
    tokens: int, dtype: torch.dtype, shapes: tuple[tuple[int, int], ...] = SHAPES, seed: int = 0
) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    draw = torch.Generator().manual_seed(seed)
    return tuple(
        (
            torch.randn(1, heads, tokens, dim, generator=draw, dtype=torch.float32).to(dtype),
            torch.randn(1, heads, tokens, dim, generator=draw, dtype=torch.float32).to(dtype),
        )
        for heads, dim in shapes
    )


def chunk_with(past: Any, tokens: int, **fields: Any) -> CachedChunk:
    ids = list(range(7, 7 + tokens))
    key = chained_hash(ids)
    given: dict[str, Any] = {
        "chunk_id": key,
        "text": "über “alles” 😀",
        "token_ids": ids,
        "past_key_values": past,
        "position_start": 5,
        "position_end": 5 + tokens,
        "prefix_hash": key,
        "content_hash": content_hash_from_tokens(ids),
        "created_at": 12.5,
        "access_count": 3,
        "recomputed": True,
        "parent_hash": "p" * 64,
    }
    return CachedChunk(**(given | fields))


def kept_chunk(bits: KVBits, dtype: torch.dtype, tokens: int) -> KeptChunk:
    past = random_kv(tokens, dtype)
    layout = KVLayout.of(past)
    plain = chunk_with((), tokens)
    fields = {name: value for name, value in vars(plain).items() if name != "past_key_values"}
    return KeptChunk(KVCodec(layout, bits).encode(layout.pack(past)), **fields)


def through_bytes(record: Record) -> KeptChunk:
    """Write a record into one piece of memory and read it from there alone."""
    raw = record.header.raw
    whole = raw + b"\xaa" * (record.header.payload_start - len(raw)) + b"".join(map(bytes, record.payload))
    assert len(whole) == record.header.record_bytes
    assert record.header.payload_start % serde.ALIGNMENT == 0
    header = read_header(whole[: serde.ALIGNMENT * 16])
    assert header is not None
    tensors = header.tensors()
    at = header.payload_start
    for tensor in tensors:
        buffer = buffer_of(tensor)
        buffer[:] = whole[at : at + buffer.nbytes]
        at += buffer.nbytes
    assert at == len(whole)
    assert header.matches([buffer_of(tensor) for tensor in tensors])
    return header.chunk(tensors)


def assert_same(found: CachedChunk, wanted: CachedChunk) -> None:
    for pair, wanted_pair in zip(found.past_key_values, wanted.past_key_values, strict=True):
        for tensor, wanted_tensor in zip(pair, wanted_pair, strict=True):
            assert tensor.dtype == wanted_tensor.dtype
            assert torch.equal(tensor, wanted_tensor)
    for name in ("chunk_id", "text", "position_start", "position_end", "prefix_hash", "content_hash"):
        assert getattr(found, name) == getattr(wanted, name), name
    for name in ("created_at", "access_count", "recomputed", "parent_hash"):
        assert getattr(found, name) == getattr(wanted, name), name
    assert list(found.token_ids) == list(wanted.token_ids)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", BITS, ids=str)
@pytest.mark.parametrize("tokens", [1, 31, 130])
def test_kept_chunks_come_back_bit_for_bit(bits: KVBits, dtype: torch.dtype, tokens: int) -> None:
    chunk = kept_chunk(bits, dtype, tokens)
    back = through_bytes(to_record(chunk))
    assert_same(back, chunk)
    assert back.kv.codec.bits == bits, "what is quantized stays so"
    for tensor, wanted in zip(back.kv.tensors, chunk.kv.tensors, strict=True):
        assert torch.equal(tensor, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunks_that_a_caller_made_come_back(dtype: torch.dtype) -> None:
    chunk = chunk_with(random_kv(9, dtype), 9)
    assert_same(through_bytes(to_record(chunk)), chunk)


def test_layers_of_several_types_and_sizes() -> None:
    past = (
        (torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 16).half()),
        (torch.randn(1, 1, 4, 8).bfloat16(), torch.randn(1, 5, 4, 8)),
    )
    chunk = chunk_with(past, 4)
    assert_same(through_bytes(to_record(chunk)), chunk)


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.0, 5e-324])
def test_odd_numbers_keep_their_bits(value: float) -> None:
    past = ((torch.full((1, 1, 2, 3), value, dtype=torch.float64),) * 2,)
    back = through_bytes(to_record(chunk_with(past, 2)))
    found = back.past_key_values[0][0]
    assert torch.equal(found.view(torch.int64), past[0][0].view(torch.int64))


def test_tensors_that_are_no_plain_blocks_of_memory() -> None:
    wide = torch.randn(1, 3, 2, 10)
    turned = wide.transpose(1, 2)[..., ::2]  # [1, 2, 3, 5], not contiguous
    chunk = chunk_with(((turned, turned.clone().requires_grad_()),), 3)
    assert_same(through_bytes(to_record(chunk)), chunk)


def test_a_chunk_of_the_fake_model_comes_back() -> None:
    chunk = user_chunk(range(50), 20, 33)
    back = through_bytes(to_record(chunk, namespace="n", content="c"))
    assert_same(back, chunk)
    meta = to_record(chunk, namespace="n", content="c").header.meta
    assert (meta["namespace"], meta["content"]) == ("n", "c")


def test_the_key_is_the_prefix_hash_or_else_the_chunk_id() -> None:
    past = random_kv(2, torch.float32)
    assert to_record(chunk_with(past, 2, prefix_hash="", chunk_id="id")).header.key == "id"
    assert to_record(chunk_with(past, 2, prefix_hash="hash", chunk_id="id")).header.key == "hash"


@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=4),
    st.sampled_from(DTYPES),
    st.text(),
    st.integers(0, 2**40),
    st.sampled_from(BITS),
)
@settings(deadline=None, max_examples=60)
def test_any_chunk_round_trips(
    tokens: int, shapes: list[tuple[int, int]], dtype: torch.dtype, text: str, position: int, bits: KVBits
) -> None:
    past = random_kv(tokens, dtype, tuple(shapes), tokens)
    chunk = chunk_with(past, tokens, text=text, position_start=position, position_end=position + tokens)
    layout = KVLayout.of(past)
    fields = {name: value for name, value in vars(chunk).items() if name != "past_key_values"}
    kept = KeptChunk(KVCodec(layout, bits).encode(layout.pack(past)), **fields)
    assert_same(through_bytes(to_record(kept)), kept)


# --- what cannot be written ------------------------------------------------------------------------


def test_a_chunk_that_borrows_from_others_is_refused() -> None:
    chunk = kept_chunk(16, torch.float32, 4)
    chunk.composite = CompositeChunk.__new__(CompositeChunk)
    with pytest.raises(CacheFileError, match="borrows"):
        to_record(chunk)


@pytest.mark.parametrize("ids", [[], [1], [1, 2, 3]])
def test_ids_that_do_not_fit_the_tensors_are_refused(ids: list[int]) -> None:
    with pytest.raises(CacheFileError):
        to_record(chunk_with(random_kv(2, torch.float32), 2, token_ids=ids))


def test_a_chunk_without_tokens_is_refused() -> None:
    with pytest.raises(CacheFileError):
        to_record(chunk_with(random_kv(0, torch.float32), 0))


# --- damage ----------------------------------------------------------------------------------------


def a_header() -> RecordHeader:
    return to_record(chunk_with(random_kv(6, torch.float16), 6)).header


def test_every_single_damaged_byte_of_a_header_is_noticed() -> None:
    raw = a_header().raw
    for place in range(len(raw)):
        for mask in (0x01, 0x80, 0xFF):
            damaged = bytearray(raw)
            damaged[place] ^= mask
            assert read_header(bytes(damaged)) is None, f"byte {place}"


def test_every_truncation_of_a_header_is_noticed() -> None:
    raw = a_header().raw
    assert all(read_header(raw[:size]) is None for size in range(len(raw)))
    assert read_header(raw) is not None
    assert read_header(raw + b"more") is not None, "what stands behind it does not matter"


@given(st.binary(max_size=300))
@settings(max_examples=200)
def test_noise_is_no_header(noise: bytes) -> None:
    assert read_header(noise) is None
    assert read_header(serde.MAGIC + noise) is None
    assert 0 <= header_size(serde.MAGIC + struct.pack("<I", serde.VERSION) + noise) <= 64 << 20


def sealed(meta: object, tokens: int = 6, payload_bytes: int | None = None, version: int = 2) -> bytes:
    """A header with right checksums, whatever it says."""
    description = json.dumps(meta).encode()
    ids = np.arange(tokens, dtype="<u4").tobytes()
    size = FIXED.size + len(description) + len(ids) + 16
    if payload_bytes is None:
        payload_bytes = a_header().payload_bytes
    fixed = FIXED.pack(b"KVBSLOT\0", version, size, len(description), len(ids), payload_bytes, b"\0" * 16)
    body = fixed + description + ids
    return body + xxhash.xxh3_128_digest(body)


def test_a_sealed_header_is_read() -> None:
    assert read_header(sealed(a_header().meta)) is not None


@pytest.mark.parametrize("version", [0, 3, 255, 2**32 - 1])
def test_unknown_versions_are_no_headers(version: int) -> None:
    assert read_header(sealed(a_header().meta, version=version)) is None
    assert header_size(sealed(a_header().meta, version=version)) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"bits": 3},
        {"bits": "16"},
        {"bits": None},
        {"bits": 16.0},
        {"slabs": []},
        {"slabs": [["float17", 1, 1]]},
        {"slabs": [["Tensor", 1, 1]]},
        {"slabs": [[3, 1, 1]]},
        {"slabs": "none"},
        {"slabs": None},
        {"slabs": [["float16", "x", 2]]},
        {"slabs": [["float16", 1]]},
        {"slabs": [["float16", 1e400, 2]]},
        {"slabs": [["float16", -1, 100], ["float16", 2, 100]]},
        {"layers": 5},
        {"layers": [[[0, 0, 1]]]},
        {"layers": [[[0, 0], [0, 1]]]},
        {"bits": 8, "layers": [[[99, 0, 1], [99, 1, 2]]]},
        {"bits": 8, "layers": [[[0, 0, 1], [0, 0, 1]], [[0, 0, 1], [0, 0, 1]]]},
        {"key": 5},
        {"key": None},
        {"text": None},
        {"position_start": "0"},
        {"parent": 7},
        {"kind": "other"},
        {"kind": None},
        {"kind": ["kv"]},
        {"tensors": []},
        {"tensors": None},
        {"tensors": [["slab0", "float16"]]},
        {"tensors": [["slab0", "float32", [1]]]},
        {"kind": "state", "tensors": [["a", "uint8", [-1]], ["b", "uint8", [1]]]},
        {"kind": "state", "tensors": [["a", "uint8", [1.0]]]},
        {"kind": "state", "tensors": [["a", "uint8", [True]]]},
        {"kind": "state", "tensors": [["a", "uint8", 5]]},
        {"kind": "state", "tensors": [["a", "Tensor", [1]]]},
        {"kind": "state", "tensors": [[1, "uint8", [1]]]},
        {"kind": "state", "tensors": [["a", "uint8", [2**40, 2**40]]]},
    ],
    ids=str,
)
def test_sealed_headers_that_make_no_sense_are_no_headers(change: dict[str, object]) -> None:
    assert read_header(sealed(a_header().meta | change)) is None


@pytest.mark.parametrize("name", sorted(a_header().meta.keys() - {"namespace", "content"}))
def test_a_sealed_header_that_lacks_a_field_is_none(name: str) -> None:
    meta = dict(a_header().meta)
    del meta[name]
    assert read_header(sealed(meta)) is None


@pytest.mark.parametrize("meta", [[], "text", 5, None, {}])
def test_a_sealed_header_of_another_kind_is_none(meta: object) -> None:
    assert read_header(sealed(meta)) is None


@pytest.mark.parametrize("tokens", [0, 5, 7])
def test_ids_that_do_not_fit_the_payload_make_no_header(tokens: int) -> None:
    assert read_header(sealed(a_header().meta, tokens)) is None


@pytest.mark.parametrize("payload_bytes", [0, 1, 2**63])
def test_another_size_of_the_payload_makes_no_header(payload_bytes: int) -> None:
    assert read_header(sealed(a_header().meta, payload_bytes=payload_bytes)) is None


def test_every_damaged_byte_of_a_payload_is_noticed() -> None:
    record = to_record(user_chunk(range(4), 0, 2))
    whole = b"".join(map(bytes, record.payload))
    sizes = [part.nbytes for part in record.payload]
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 0x10
        parts, at = [], 0
        for size in sizes:
            parts.append(memoryview(damaged)[at : at + size])
            at += size
        assert not record.header.matches(parts), f"byte {place}"
    assert record.header.matches(record.payload)


def test_a_payload_under_the_header_of_another_is_noticed() -> None:
    """Same KV, same tokens, another key, place or parent: another checksum."""
    past = random_kv(4, torch.float32)
    one = to_record(chunk_with(past, 4))
    for change in ({"prefix_hash": "x"}, {"position_start": 6, "position_end": 10}, {"parent_hash": "q"}):
        other = to_record(chunk_with(past, 4, **change))
        assert b"".join(map(bytes, one.payload)) == b"".join(map(bytes, other.payload))
        assert not other.header.matches([memoryview(b"")])
        assert one.header.checksum != other.header.checksum


def test_a_stored_kv_shares_its_memory_with_the_record() -> None:
    """Nothing is copied on the way to the disk."""
    chunk = kept_chunk(16, torch.float32, 3)
    assert isinstance(chunk.kv, StoredKV)
    record = to_record(chunk)
    chunk.kv.tensors[0].view(-1)[0] = 77.0
    assert np.frombuffer(record.payload[0], dtype="<f4")[0] == 77.0


@pytest.mark.parametrize("bits", BITS, ids=str)
def test_a_record_in_one_piece_comes_back(bits: KVBits) -> None:
    chunk = kept_chunk(bits, torch.bfloat16, 9)
    record = to_record(chunk)
    data = record.to_bytes()
    assert len(data) == record.header.record_bytes
    back = serde.from_bytes(data, chunk.prefix_hash)
    assert back is not None
    assert_same(back, chunk)


def test_a_piece_that_is_damaged_or_anothers_is_no_chunk() -> None:
    chunk = kept_chunk(16, torch.float32, 3)
    record = to_record(chunk)
    key, data = chunk.prefix_hash, record.to_bytes()
    assert serde.from_bytes(data, key) is not None
    assert serde.from_bytes(data, key[::-1]) is None
    for other in (b"", data[:-1], data + b"\0", data[: record.header.payload_start], data * 2):
        assert serde.from_bytes(other, key) is None
    for at in (0, len(record.header.raw) - 1, record.header.payload_start, len(data) - 1):
        flipped = bytearray(data)
        flipped[at] ^= 1
        assert serde.from_bytes(bytes(flipped), key) is None


# --- other kinds, and the version before -----------------------------------------------------------

STATE = {"conv": torch.randn(4, 3), "ssm": torch.randn(2, 5).bfloat16(), "empty": torch.zeros(0, 7)}


@pytest.mark.parametrize("kind", ["state", "opaque"])
@pytest.mark.parametrize("ids", [(), (5, 6, 7)])
def test_named_tensors_come_back(kind: serde.Kind, ids: tuple[int, ...]) -> None:
    record = serde.record_of(kind, "k", STATE, ids, namespace="n", parent="p", about={"layer": 3})
    found = serde.tensors_in(record.to_bytes(), "k")
    assert found is not None
    header, tensors = found
    assert (header.kind, header.meta["about"], header.token_ids.tolist()) == (kind, {"layer": 3}, list(ids))
    assert [spec.name for spec in header.specs] == list(STATE)
    for tensor, wanted in zip(tensors, STATE.values(), strict=True):
        assert tensor.dtype == wanted.dtype
        assert torch.equal(tensor, wanted)
    assert serde.from_bytes(record.to_bytes(), "k") is None, "it is no chunk"
    assert not header.is_chunk_of(None)


@pytest.mark.parametrize("dtype", sorted(serde._DTYPES))
def test_tensors_of_every_type_come_back(dtype: str) -> None:
    tensor = torch.arange(6).to(serde._DTYPES[dtype]).view(2, 3)
    found = serde.tensors_in(serde.record_of("opaque", "k", {"t": tensor}).to_bytes(), "k")
    assert found is not None
    assert torch.equal(found[1][0].view(torch.uint8), tensor.view(torch.uint8))


def test_types_that_no_reader_knows_are_refused() -> None:
    with pytest.raises(CacheFileError, match="complex64"):
        serde.record_of("opaque", "k", {"t": torch.zeros(2, dtype=torch.complex64)})


def test_names_that_stand_twice_make_no_header() -> None:
    meta = serde.record_of("state", "k", {"a": torch.zeros(2), "b": torch.zeros(2)}).header.meta
    assert read_header(sealed(meta, 0, 16)) is not None
    twice = {**meta, "tensors": [meta["tensors"][0]] * 2}
    assert read_header(sealed(twice, 0, 16)) is None


@pytest.mark.parametrize("bits", BITS, ids=str)
def test_a_record_of_the_version_before_is_read(bits: KVBits) -> None:
    chunk = kept_chunk(bits, torch.float16, 40)
    record = to_record(chunk, namespace="n", content="c").of_version_1()
    assert record.header.raw[8] == 1
    assert not {"kind", "tensors"} & record.header.meta.keys()
    assert_same(through_bytes(record), chunk)


def test_fields_of_this_version_make_no_header_of_the_one_before() -> None:
    assert read_header(sealed(a_header().meta, version=1)) is None
    old = {name: value for name, value in a_header().meta.items() if name not in ("kind", "tensors")}
    assert read_header(sealed(old, version=1)) is not None
    assert read_header(sealed(old, version=2)) is None


def test_only_chunks_can_be_written_as_before() -> None:
    with pytest.raises(CacheFileError, match="chunks only"):
        serde.record_of("state", "k", STATE).of_version_1()
