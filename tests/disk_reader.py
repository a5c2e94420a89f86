"""A second reader of the disk format, made from docs/disk-format.md alone: it imports nothing of kvboost."""

from __future__ import annotations

import json
import sqlite3
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

FIXED = struct.Struct("<8sIIIIQ16s")
MAGIC = b"KVBSLOT\0"
ALIGNMENT = 4_096
ITEM_BYTES = dict.fromkeys(("uint8", "int8", "bool", "float8_e4m3fn", "float8_e5m2"), 1)
ITEM_BYTES |= {"float16": 2, "bfloat16": 2, "int16": 2, "float32": 4, "int32": 4, "float64": 8, "int64": 8}
# per width: (bits, what shares a step, group, channels that are rotated together) of keys and of values
SCHEMES = {
    8: ((8, "channel", 64, 1), (8, "token", 64, 1)),
    4: ((4, "channel", 32, 64), (4, "token", 64, 16)),
    "k8v4": ((8, "channel", 64, 1), (4, "token", 64, 16)),
}


class FormatError(Exception):
    """What was read is not what the format says."""


@dataclass(frozen=True)
class ReadRecord:
    """One record, all of its checksums right."""

    slot: int
    version: int
    meta: dict[str, Any]
    token_ids: list[int]
    payload: bytes

    @property
    def kind(self) -> str:
        return "kv" if self.version == 1 else str(self.meta["kind"])

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
        """Type, shape and bytes of every tensor by its name, as version 2 lists them."""
        found, at = {}, 0
        for name, dtype, shape in self.meta["tensors"]:
            size = int(np.prod(shape, dtype=np.int64)) * ITEM_BYTES[dtype]
            found[name] = (dtype, tuple(shape), self.payload[at : at + size])
            at += size
        expect(at == len(self.payload), "the tensors do not fill the payload")
        expect(len(found) == len(self.meta["tensors"]), "a name stands twice")
        return found

    def slabs(self) -> list[bytes]:
        """The payload cut into one piece per slab."""
        pieces, at = [], 0
        for size in slab_sizes(self.meta, len(self.token_ids)):
            pieces.append(self.payload[at : at + size])
            at += size
        expect(at == len(self.payload), "the slabs do not fill the payload")
        return pieces

    def arrays(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Keys and values per layer, [heads, tokens, head_dim]; bfloat16 comes as float32. 16 bits only."""
        expect(self.meta["bits"] == 16, "this chunk is quantized")
        slabs = []
        for (dtype, heads, head_dim), piece in zip(self.meta["slabs"], self.slabs(), strict=True):
            if dtype == "bfloat16":
                array = (np.frombuffer(piece, "<u2").astype("<u4") << 16).view("<f4")
            else:
                array = np.frombuffer(piece, f"<f{ITEM_BYTES[dtype]}")
            slabs.append(array.reshape(heads, len(self.token_ids), head_dim))
        return [
            (slabs[key[0]][key[1] : key[2]], slabs[value[0]][value[1] : value[2]])
            for key, value in self.meta["layers"]
        ]

    def sections(self) -> list[list[tuple[str, np.ndarray]]]:
        """Of a quantized chunk: the named arrays of each slab, block by block."""
        tokens = len(self.token_ids)
        found = []
        for number, piece in enumerate(self.slabs()):
            arrays, at = [], 0
            for name, shape, dtype in section_shapes(self.meta, number, tokens):
                size = int(np.prod(shape)) * np.dtype(dtype).itemsize
                arrays.append((name, np.frombuffer(piece[at : at + size], dtype).reshape(shape)))
                at += eights(size)
            found.append(arrays)
        return found


def expect(condition: bool, message: str) -> None:
    if not condition:
        raise FormatError(message)


def eights(size: int) -> int:
    return -(-size // 8) * 8


def blocks(meta: dict[str, Any], slab: int) -> list[tuple[int, list[int], int]]:
    """Per block of a slab, keys first: (0 = keys or 1 = values, first head per layer, heads per layer)."""
    found = []
    for side in (0, 1):
        starts: dict[tuple[int, int], list[int]] = {}
        for layer in meta["layers"]:
            number, start, end = layer[side]
            starts.setdefault((number, end - start), []).append(start)
        for (number, heads), firsts in starts.items():
            if number == slab:
                found += [(side, run, heads) for run in equal_steps(sorted(firsts))]
    return found


def equal_steps(numbers: list[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and (len(runs[-1]) == 1 or number - runs[-1][-1] == runs[-1][1] - runs[-1][0]):
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def section_shapes(meta: dict[str, Any], slab: int, tokens: int) -> list[tuple[str, tuple[int, ...], str]]:
    """Name, shape and type of all arrays of a quantized slab, in the order of their bytes."""
    head_dim = meta["slabs"][slab][2]
    found: list[tuple[str, tuple[int, ...], str]] = []
    for side, firsts, heads in blocks(meta, slab):
        bits, per, group, _ = SCHEMES[meta["bits"]][side]
        code_bytes = head_dim if bits == 8 else (head_dim + 1) // 2
        if per == "channel":
            steps = (-(-tokens // group), head_dim)
        else:
            steps = (tokens, head_dim // group if head_dim % group == 0 else 1)
        lead = (len(firsts), heads)
        found += [
            ("codes", (*lead, tokens, code_bytes), "u1"),
            ("steps", (*lead, *steps), "<f2"),
            ("minima", (*lead, *steps), "<f2"),
            ("exponents", (*lead, 1, 1), "<i2"),
            ("first", (*lead, 1, head_dim), "<f2"),
        ]
    return found


def slab_sizes(meta: dict[str, Any], tokens: int) -> list[int]:
    """Bytes of each slab of the payload."""
    if meta["bits"] == 16:
        return [heads * tokens * head_dim * ITEM_BYTES[dtype] for dtype, heads, head_dim in meta["slabs"]]
    return [
        sum(
            eights(int(np.prod(shape)) * np.dtype(dtype).itemsize)
            for _, shape, dtype in section_shapes(meta, slab, tokens)
        )
        for slab in range(len(meta["slabs"]))
    ]


def read_slot(folder: Path, slot: int, slot_bytes: int, header: bytes | None = None) -> ReadRecord:
    """The record in a slot; `header` is the one that the index has for it."""
    with (folder / "slots.bin").open("rb") as file:
        file.seek(slot * slot_bytes)
        raw = file.read(slot_bytes)
    magic, version, size, json_bytes, token_bytes, payload_bytes, checksum = FIXED.unpack_from(raw)
    expect(magic == MAGIC and version in (1, 2), "no record of version 1 or 2")
    expect(size == FIXED.size + json_bytes + token_bytes + 16, "the sizes in the header disagree")
    expect(xxhash.xxh3_128_digest(raw[: size - 16]) == raw[size - 16 : size], "the header is damaged")
    expect(header is None or raw[:size] == header, "the slot holds another record than the index says")
    meta = json.loads(raw[FIXED.size : FIXED.size + json_bytes])
    described = raw[FIXED.size : size - 16]
    start = -(-size // ALIGNMENT) * ALIGNMENT
    payload = raw[start : start + payload_bytes]
    expect(len(payload) == payload_bytes, "the payload does not fit the slot")
    digest = xxhash.xxh3_128_digest(meta["key"].encode() + described + payload)
    expect(digest == checksum, "the payload is damaged")
    ids = np.frombuffer(raw[FIXED.size + json_bytes : size - 16], "<u4").tolist()
    record = ReadRecord(slot, version, meta, ids, payload)
    slabs = record.slabs() if record.kind == "kv" else []
    if version == 2:
        expect(record.kind in ("kv", "state", "opaque"), "an unknown kind")
        pieces = [piece for _, _, piece in record.tensors().values()]
        expect(record.kind != "kv" or pieces == slabs, "the tensors are not the slabs")
    return record


def decoded(record: ReadRecord) -> list[tuple[np.ndarray, np.ndarray]]:
    """Keys and values of each layer of a quantized chunk, [heads, tokens, head_dim], float64."""
    meta, tokens = record.meta, len(record.token_ids)
    slabs = []
    for number, ((_, num_heads, head_dim), arrays) in enumerate(
        zip(meta["slabs"], record.sections(), strict=True)
    ):
        slab = np.empty((num_heads, tokens, head_dim))
        parts = iter(arrays)
        for side, firsts, heads in blocks(meta, number):
            named = dict(next(parts) for _ in range(5))
            block = decoded_block(named, SCHEMES[meta["bits"]][side], head_dim)
            for place, first in enumerate(firsts):
                slab[first : first + heads] = block[place]
        slabs.append(slab)
    return [(slabs[k[0]][k[1] : k[2]], slabs[v[0]][v[1] : v[2]]) for k, v in meta["layers"]]


def decoded_block(
    named: dict[str, np.ndarray], scheme: tuple[int, str, int, int], head_dim: int
) -> np.ndarray:
    """One block as numbers, [layers, heads, tokens, head_dim]."""
    bits, per, group, most = scheme
    codes = named["codes"]
    if bits == 4:
        codes = np.concatenate([codes & 15, codes >> 4], axis=-1)[..., :head_dim]
    tokens = codes.shape[-2]
    steps, minima = named["steps"].astype(float), named["minima"].astype(float)
    if per == "channel":
        of_token = np.arange(tokens) // group
        steps, minima = steps[..., of_token, :], minima[..., of_token, :]
    else:
        width = head_dim // steps.shape[-1]
        steps, minima = np.repeat(steps, width, axis=-1), np.repeat(minima, width, axis=-1)
    unit = 2.0 ** named["exponents"].astype(float)
    numbers = (codes * steps + minima) * unit
    size = min(most, head_dim & -head_dim)
    if size > 1:
        numbers = (numbers.reshape(-1, size) @ hadamard(size)).reshape(numbers.shape)
    numbers[..., :1, :] = named["first"].astype(float) * unit
    return numbers


def hadamard(size: int) -> np.ndarray:
    """The orthonormal Hadamard matrix; it is its own inverse."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(size)


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, ReadRecord]]:
    """The settings and all records of a folder, by key, what was used longest ago first."""
    settings = json.loads((folder / "tier.json").read_text())
    expect(
        settings["format"] == "kvboost-disk" and settings["version"] in (1, 2), "another format or version"
    )
    connection = sqlite3.connect(f"file:{folder / 'index.sqlite'}?mode=ro", uri=True)
    try:
        numbers = dict(connection.execute("SELECT name, value FROM meta"))
        rows = connection.execute("SELECT key, slot, header FROM entries ORDER BY used, rowid").fetchall()
    finally:
        connection.close()
    expect(numbers["version"] == settings["version"], "an index of another version")
    records = {}
    for key, slot, header in rows:
        expect(0 <= slot < numbers["num_slots"], "a slot outside of the file")
        record = read_slot(folder, slot, settings["slot_bytes"], header)
        expect(record.meta["key"] == key, "the row belongs to another key")
        records[key] = record
    return settings, records
