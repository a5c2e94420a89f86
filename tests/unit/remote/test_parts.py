"""Records cut into parts: put together again they are the same, and nothing else is taken for them."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.disk.serde import Record, record_of
from kvboost.remote import parts
from tests.faults.disk_writer import chunk_of, key_of

NAME = "kvb:1:tenant:name"
KEY = "ab" * 32
MB = 1 << 20


def record(size: int, key: str = KEY) -> Record:
    """An opaque record with so many bytes of payload."""
    tensor = torch.arange(size, dtype=torch.int64).to(torch.uint8)
    return record_of("opaque", key, {"bytes": tensor}, [1, 2, 3])


def values_of(of: Record, name: str = NAME) -> list[bytes]:
    return [b"".join(buffers) for buffers in parts.split(of, name)]


@cache
def small() -> list[bytes]:
    """A record in three parts that are short enough to try every byte of."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "MAX_BODY", 2_000)
        return values_of(record(300))


def joined(values: list[bytes | None], name: str = NAME, key: str = KEY) -> parts.Joined | str:
    return parts.join(values, name, key)


@pytest.mark.parametrize(
    ("size", "count"),
    [
        (0, 1),
        (1, 1),
        (MB, 1),
        (4 * MB - 4096, 1),
        (4 * MB - 4095, 2),
        (4 * MB, 2),
        (6 * MB, 2),
        (8 * MB - 4096, 2),
        (8 * MB - 4095, 3),
        (17 * MB, 5),
    ],
)
def test_there_and_back(size: int, count: int) -> None:
    made = record(size)
    values = values_of(made)
    assert len(values) == count == parts.count_for(made.header.record_bytes)
    if count > 1:
        assert all(MB <= len(value) <= 4 * MB + parts.HEADER_BYTES for value in values)
    found = joined(list(values))
    assert isinstance(found, parts.Joined)
    assert found.header.raw == made.header.raw
    assert bytes(found.tensors[0].numpy()) == made.payload[0].tobytes()


def test_nothing_is_copied_when_it_is_cut() -> None:
    made = record(9 * MB)
    payload = made.payload[0]
    pieces = [
        buffer for buffers in parts.split(made, NAME) for buffer in buffers if buffer.obj is payload.obj
    ]
    assert sum(piece.nbytes for piece in pieces) == payload.nbytes


def test_a_chunk() -> None:
    from kvboost.disk.serde import to_record

    made = to_record(chunk_of(3))
    found = joined(list(values_of(made)), key=key_of(3))
    assert isinstance(found, parts.Joined)
    assert found.header.chunk(found.tensors).token_ids == chunk_of(3).token_ids


def test_every_flipped_bit_is_noticed() -> None:
    """In every byte of every part; which of its bits, is drawn."""
    draw = random.Random(1)
    values = small()
    assert len(values) == 3
    for number, value in enumerate(values):
        for at in range(len(value)):
            other = bytearray(value)
            other[at] ^= 1 << draw.randrange(8)
            spoiled = [*values[:number], bytes(other), *values[number + 1 :]]
            assert isinstance(joined(spoiled), str), (number, at)


def test_every_truncation_is_noticed() -> None:
    values = small()
    for number, value in enumerate(values):
        for size in range(len(value)):
            for cut in (value[:size], value + value[:size] if size else value[:-1]):
                spoiled = [*values[:number], cut, *values[number + 1 :]]
                assert isinstance(joined(spoiled), str), (number, size)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 2, None, "other name", "other writer", "other record"]), max_size=4))
def test_only_all_parts_of_one_write_in_order_are_a_record(order: list[int | str | None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "MAX_BODY", 2_000)
        foreign = {
            "other name": values_of(record(300), NAME + "x"),
            "other writer": values_of(record(300)),
            "other record": values_of(record(299)),
        }
    own = small()
    values: list[bytes | None] = []
    for number, each in enumerate(order):
        if each is None:
            values.append(None)
        elif isinstance(each, int):
            values.append(own[each])
        else:
            values.append(foreign[each][number % 3])
    found = joined(values)
    if order == [0, 1, 2]:
        assert isinstance(found, parts.Joined)
    elif order == ["other writer"] * 3:
        assert isinstance(found, parts.Joined), "a whole record of another writer is one"
    elif order == ["other record"] * 3:
        assert isinstance(found, parts.Joined)
    else:
        assert isinstance(found, str)


def test_the_reasons() -> None:
    own, other = small(), None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "MAX_BODY", 2_000)
        other = values_of(record(300))
    assert joined([own[0], None, own[2]]) == parts.GONE
    assert joined(list(own[:2])) == parts.GONE
    assert joined([own[0], other[1], own[2]]) == parts.TORN
    assert joined([own[1], own[0], own[2]]) == parts.CORRUPT
    assert joined(list(own), key="cd" * 32) == parts.CORRUPT
    assert joined(list(own), name="kvb:1:tenant:another") == parts.CORRUPT


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_other_bytes_are_no_part(data: bytes, with_start: bool) -> None:
    value = small()[0][: parts.HEADER_BYTES] + data if with_start else data
    assert with_start or parts.read_start(value, NAME) is None
    assert isinstance(joined([value]), str)


def test_a_start_that_is_damaged_is_not_believed() -> None:
    """It is acted on before the rest is read: how many parts there are, and how large they are."""
    start = small()[0][: parts.HEADER_BYTES]
    good = parts.read_start(start, NAME)
    assert good is not None
    draw = random.Random(2)
    for at in range(parts.HEADER_BYTES - 16):  # behind it stands the checksum of the whole part
        other = bytearray(start)
        other[at] ^= 1 << draw.randrange(8)
        assert parts.read_start(bytes(other), NAME) is None, at
