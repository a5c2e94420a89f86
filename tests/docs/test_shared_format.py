"""What docs/disk-format.md says about the shared store is enough to read it: names, parts and places."""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from itertools import pairwise

import numpy as np
import pytest
import torch
import transformers
import xxhash

from tests.fixture_types import MakeEngine
from tests.tiny_models import random_ids
from tests.unit.remote.memory_store import MemoryStore

SALT = "a salt"
TOKENS, CHUNK = 96, 32
MULTIPLIERS = (
    *(0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xFF51AFD7ED558CCD),
    *(0xC4CEB9FE1A85EC53, 0xD6E8FEB86659FD93),
)


@pytest.fixture
def filled(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, bytes], str, str]:
    """The values of a store, the family, and the root of the namespace."""
    store = MemoryStore()
    monkeypatch.setattr("kvboost.parts.engine_parts.open_store", lambda _address: store)
    monkeypatch.setattr("kvboost.remote.parts.MAX_BODY", 16_384)  # so that records have several parts
    with make_engine(remote_cache="redis://x", cache_salt=SALT, chunk_size=CHUNK) as engine:
        engine.warm(random_ids(TOKENS, seed=0))
        assert engine.core.parts.remote is not None
        assert engine.core.parts.remote.flush()
        namespace, form = engine.core.parts.namespace(), engine.core.parts.codec.form
    versions = [".".join(module.__version__.split(".")[:2]) for module in (torch, transformers)]
    family = f"{namespace.family} {form} torch {versions[0]} transformers {versions[1]}"
    return store.values, family, namespace.key


def name_of(family: str, what: str, value: bytes) -> str:
    key = hashlib.sha256(SALT.encode()).digest()
    tenant = hmac.digest(key, b"tenant", "sha256").hex()[:32]
    message = b"\0".join([what.encode(), family.encode(), value])
    return f"kvb:1:{tenant}:{hmac.digest(key, message, 'sha256').hex()[:40]}"


def chain(root: str) -> list[str]:
    ids = np.array(random_ids(TOKENS, seed=0), dtype="<u4")
    keys = [root]
    for start in range(0, TOKENS, CHUNK):
        keys.append(hashlib.sha256(keys[-1].encode() + ids[start : start + CHUNK].tobytes()).hexdigest())
    return keys


def body_of(value: bytes, name: str, number: int) -> tuple[bytes, bytes]:
    """The body of a part, and the random bytes of its write."""
    magic, own, version, found, _, size, _, owner, writer = struct.unpack_from("<8sIIIIQQ16s8s", value)
    assert (magic, version, found) == (b"KVBPART\0", 1, number)
    assert own == xxhash.xxh32_intdigest(value[12:64])
    assert owner == hashlib.sha256(name.encode()).digest()[:16]
    assert len(value) == 80 + size
    assert value[64:80] == xxhash.xxh3_128_digest(value[:64] + value[80:])
    return value[80:], writer


def window_hash(ids: list[int]) -> int:
    hashes = [token * 0x9E3779B97F4A7C15 % 2**64 for token in ids]
    for multiplier in MULTIPLIERS:
        pairs = zip(hashes[::2], hashes[1::2], strict=True)
        hashes = [((a ^ (a >> 29)) * multiplier + b) % 2**64 for a, b in pairs]
    (found,) = hashes
    return found


def test_records(filled: tuple[dict[str, bytes], str, str]) -> None:
    values, family, root = filled
    for key in chain(root)[1:]:
        name = name_of(family, "record", key.encode())
        count = struct.unpack_from("<I", values[f"{name}:0"], 20)[0]
        assert count > 1
        bodies = [body_of(values[f"{name}:{number}"], name, number) for number in range(count)]
        assert len({writer for _, writer in bodies}) == 1
        record = b"".join(body for body, _ in bodies)
        assert len(record) == struct.unpack_from("<Q", values[f"{name}:0"], 32)[0]
        json_bytes = struct.unpack_from("<I", record, 16)[0]
        described = json.loads(record[48 : 48 + json_bytes])
        assert (described["key"], described["text"]) == (key, "")


def test_tails(filled: tuple[dict[str, bytes], str, str]) -> None:
    values, family, root = filled
    keys, ids = chain(root), np.array(random_ids(TOKENS, seed=0), dtype="<u4")
    for number, (parent, key) in enumerate(pairwise(keys)):
        value = values[name_of(family, "tail", parent.encode())]
        magic, digest, tokens, start = struct.unpack("<4s32sI8s", value[:48])
        assert (magic, digest.hex(), tokens) == (b"KVBT", key, CHUNK)
        first = ids[CHUNK * number : CHUNK * number + 16]
        assert start == xxhash.xxh3_64_digest(first.tobytes())
        assert value[48:] == xxhash.xxh3_64_digest(value[:48])


def test_windows(filled: tuple[dict[str, bytes], str, str]) -> None:
    """Of every 16 windows in a row, the one with the smallest hash is there, and says where it stands."""
    values, family, root = filled
    keys, ids = chain(root), random_ids(TOKENS, seed=0)
    hashes = [window_hash(ids[at : at + 32]) for at in range(TOKENS - 31)]
    chosen = {min(range(at, at + 16), key=hashes.__getitem__) for at in range(len(hashes) - 15)}
    for at in chosen:
        value = values[name_of(family, "window", struct.pack("<Q", hashes[at]))]
        magic, digest, parent, offset, tokens, before = struct.unpack("<4s32s32siII", value[:80])
        number = keys.index(digest.hex())
        assert (magic, parent.hex(), tokens) == (b"KVBW", keys[number - 1], CHUNK)
        assert before == (CHUNK if number > 1 else 0)
        assert (number - 1) * CHUNK + offset == at
        assert value[80:] == xxhash.xxh3_64_digest(value[:80])
