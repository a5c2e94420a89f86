"""Records cut into parts of 1 to 4 MB for a shared store, and put together again.

Every part begins with a header: which record it belongs to, which write, its number, how many there are, and
a checksum over header and body. So a part that is damaged, cut short, or another record's is told apart, and
so are the parts of two writers. docs/disk-format.md describes every byte. Knows records, no store.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import xxhash

from kvboost.disk import serde
from kvboost.disk.serde import Buffer, Record, RecordHeader

MAGIC = b"KVBPART\0"
VERSION = 1
MAX_BODY = 4 << 20
CORRUPT = "corrupt"
GONE = "evicted"
TORN = "parts of two writers"
# magic, checksum of what follows up to the writer, version, number, count, body, record, owner, writer
_FIELDS = struct.Struct("<8sIIIIQQ16s8s")
_CHECKED = struct.Struct("<IIIQQ16s8s")
_DIGEST_BYTES = 16
HEADER_BYTES = _FIELDS.size + _DIGEST_BYTES


class PartHeader(NamedTuple):
    """What a part says about itself."""

    number: int
    num_parts: int
    body_bytes: int
    record_bytes: int
    owner: bytes
    writer: bytes


def count_for(record_bytes: int) -> int:
    """How many parts a record of so many bytes has."""
    return max(1, -(-record_bytes // MAX_BODY))


def owner_of(name: str) -> bytes:
    """What the parts of the record called `name` carry, so that none is taken for another's."""
    return hashlib.sha256(name.encode()).digest()[:16]


def split(record: Record, name: str) -> list[list[Buffer]]:
    """The parts of a record: each as buffers to be written one after the other. Nothing is copied."""
    padding = bytes(record.header.payload_start - len(record.header.raw))
    total = record.header.record_bytes
    count = count_for(total)
    body = -(-total // count)
    writer = os.urandom(8)
    pieces = _cut([memoryview(record.header.raw), memoryview(padding), *record.payload], body)
    parts = []
    for number, buffers in enumerate(pieces):
        size = sum(each.nbytes for each in buffers)
        checked = _CHECKED.pack(VERSION, number, count, size, total, owner_of(name), writer)
        fields = MAGIC + struct.pack("<I", xxhash.xxh32_intdigest(checked)) + checked
        parts.append([memoryview(fields + _checksum(fields, buffers)), *buffers])
    return parts


def _cut(buffers: Sequence[Buffer], size: int) -> Iterator[list[Buffer]]:
    """The bytes of `buffers` in runs of `size`, the last one shorter."""
    run: list[Buffer] = []
    room = size
    for buffer in buffers:
        rest = buffer
        while rest.nbytes:
            piece, rest = rest[:room], rest[room:]
            run.append(piece)
            room -= piece.nbytes
            if not room:
                yield run
                run, room = [], size
    if run:
        yield run


def read_start(start: Buffer | bytes | None, name: str) -> PartHeader | None:
    """The header in the first bytes of a part of the record `name`; None where there is none.

    It has a checksum of its own: how much is to be read is believed before the rest is there.
    """
    if start is None or len(start) < HEADER_BYTES:
        return None
    magic, digest, version, number, count, body, total, owner, writer = _FIELDS.unpack_from(start)
    is_whole = xxhash.xxh32_intdigest(bytes(start[_FIELDS.size - _CHECKED.size : _FIELDS.size])) == digest
    fits = magic == MAGIC and version == VERSION and owner == owner_of(name) and number < count and is_whole
    return PartHeader(number, count, body, total, owner, writer) if fits else None


def key_in(value: Buffer | bytes, name: str) -> str | None:
    """The key that the record `name` gives itself, from its whole part 0; None where it cannot be read."""
    view = memoryview(value)
    if read_start(view, name) is None:
        return None
    body = view[HEADER_BYTES:]
    header = serde.read_header(body[: serde.header_size(body[:64].tobytes())].tobytes())
    return header.key if header is not None else None


def join(parts: Sequence[Buffer | bytes | None], name: str, key: str) -> Joined | str:
    """The record `key` from the values of all its parts; the reason where it cannot be had.

    Every part is verified by its checksum, and the record by its own. The payload is copied once.
    """
    if not parts or any(value is None for value in parts):
        return GONE
    bodies, headers = [], []
    for number, value in enumerate(parts):
        view = memoryview(value)  # type: ignore[arg-type]
        header = read_start(view, name)
        if header is None or header.number != number or view.nbytes != HEADER_BYTES + header.body_bytes:
            return CORRUPT
        fields, digest = bytes(view[: _FIELDS.size]), bytes(view[_FIELDS.size : HEADER_BYTES])
        body = view[HEADER_BYTES:]
        if _checksum(fields, [body]) != digest:
            return CORRUPT
        headers.append(header)
        bodies.append(body)
    if len({(each.writer, each.num_parts, each.record_bytes) for each in headers}) > 1:
        return TORN
    if headers[0].num_parts != len(parts):
        return GONE if headers[0].num_parts > len(parts) else CORRUPT
    return _joined(bodies, key)


class Joined(NamedTuple):
    """A record that was read and verified."""

    header: RecordHeader
    tensors: tuple[torch.Tensor, ...]


def _joined(bodies: Sequence[Buffer], key: str) -> Joined | str:
    total = sum(body.nbytes for body in bodies)
    header = serde.read_header(bodies[0][: serde.header_size(bodies[0][:64].tobytes())].tobytes())
    if header is None or header.key != key or header.record_bytes != total:
        return CORRUPT
    tensors = header.tensors()
    payload = [serde.buffer_of(tensor) for tensor in tensors]
    _fill(payload, bodies, header.payload_start)
    return Joined(header, tensors) if header.matches(payload) else CORRUPT


def _fill(targets: Sequence[Buffer], sources: Sequence[Buffer], skip: int) -> None:
    """Copy the bytes of `sources` behind the first `skip` into `targets`, which have as many."""
    rest = [target for target in targets if target.nbytes]
    for source in sources:
        if skip >= source.nbytes:
            skip -= source.nbytes
            continue
        left, skip = source[skip:], 0
        while left.nbytes:
            size = min(left.nbytes, rest[0].nbytes)
            rest[0][:size] = left[:size]
            rest[0], left = rest[0][size:], left[size:]
            if not rest[0].nbytes:
                rest.pop(0)


def _checksum(fields: bytes, buffers: Sequence[Buffer]) -> bytes:
    digest = xxhash.xxh3_128(fields)
    for buffer in buffers:
        digest.update(buffer)
    return bytes(digest.digest())
