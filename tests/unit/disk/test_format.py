"""docs/disk-format.md is true: a reader made from it alone reads what the disk tier wrote."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from kvboost.choices import BITS, KVBits
from kvboost.disk import folder as disk_folder
from kvboost.disk import index as disk_index
from kvboost.disk import serde
from kvboost.disk.tier import DiskTier
from kvboost.errors import CacheFileError
from kvboost.kv.codec import KeptChunk, KVCodec
from kvboost.kv.layout import KVLayout
from kvboost.models import chained_hash
from tests import disk_reader
from tests.disk_reader import FormatError, read_folder, read_slot
from tests.faults.disk_writer import SLOT_BYTES, chunk_of, is_right, key_of

ROOT = Path(__file__).parents[3]
DOCUMENT = (ROOT / "docs" / "disk-format.md").read_text()
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
TOKENS = 70  # more than one group of keys
SHAPES = ((1, 2), (2, 64), (2, 64), (3, 128), (1, 64))  # (kv_heads, head_dim) of each layer


def kept(bits: KVBits, dtype: torch.dtype) -> KeptChunk:
    draw = torch.Generator().manual_seed(2)
    past = tuple(
        (
            torch.randn(1, heads, TOKENS, dim, generator=draw).to(dtype),
            torch.randn(1, heads, TOKENS, dim, generator=draw).to(dtype),
        )
        for heads, dim in SHAPES
    )
    layout = KVLayout.of(past)
    ids = list(range(1_000, 1_000 + TOKENS))
    key = chained_hash([*ids, DTYPES.index(dtype), BITS.index(bits)])
    return KeptChunk(
        KVCodec(layout, bits).encode(layout.pack(past)),
        chunk_id=key,
        text="ein Text, “quoted”",
        token_ids=ids,
        position_start=17,
        position_end=17 + TOKENS,
        prefix_hash=key,
        parent_hash="p",
        created_at=5.5,
        access_count=2,
        recomputed=True,
    )


def test_the_second_reader_imports_nothing_of_ours() -> None:
    tree = ast.parse(Path(disk_reader.__file__).read_text())
    names = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert not any(name.split(".")[0] in ("kvboost", "torch", "tests") for name in names), names


@pytest.mark.parametrize("is_open", [True, False])
def test_raw_chunks_are_read_by_the_second_reader(is_open: bool, tmp_path: Path) -> None:
    chunks = [kept(16, dtype) for dtype in DTYPES]
    tier = DiskTier(tmp_path / "cache", max_chunks=6, slot_bytes=1 << 20)
    assert all(tier.write(chunk) for chunk in chunks)
    if not is_open:
        tier.close()
    settings, records = read_folder(tmp_path / "cache")
    tier.close()
    assert (settings["max_chunks"], settings["slot_bytes"]) == (6, 1 << 20)
    assert list(records) == [chunk.prefix_hash for chunk in chunks]
    for chunk in chunks:
        record = records[chunk.prefix_hash]
        assert record.token_ids == list(chunk.token_ids)
        for name in ("text", "position_start", "created_at", "access_count", "recomputed"):
            assert record.meta[name] == getattr(chunk, name)
        assert record.meta["parent"] == "p"
        for pair, wanted_pair in zip(record.arrays(), chunk.past_key_values, strict=True):
            for array, wanted in zip(pair, wanted_pair, strict=True):
                as_numpy = wanted[0].float() if wanted.dtype == torch.bfloat16 else wanted[0]
                assert np.array_equal(array, as_numpy.numpy())


@pytest.mark.parametrize("bits", [8, 4, "k8v4"])
def test_quantized_chunks_are_read_by_the_second_reader(bits: KVBits, tmp_path: Path) -> None:
    chunk = kept(bits, torch.float32)
    with DiskTier(tmp_path / "cache", max_chunks=2, slot_bytes=1 << 20) as tier:
        assert tier.write(chunk)
        slot = tier.entries()[0].slot
    record = read_slot(tmp_path / "cache", slot, 1 << 20)
    assert record.meta["bits"] == bits
    pieces = record.slabs()
    assert [len(piece) for piece in pieces] == [tensor.nbytes for tensor in chunk.kv.tensors]
    for piece, tensor in zip(pieces, chunk.kv.tensors, strict=True):
        assert piece == tensor.numpy().tobytes()


@pytest.mark.parametrize("bits", [8, 4, "k8v4"])
def test_the_numbers_of_quantized_chunks_follow_from_the_document(bits: KVBits, tmp_path: Path) -> None:
    """With one step per group: (code * step + minimum) * 2**exponent, rotated back where 4 bits are used."""
    chunk = kept(bits, torch.float32)
    with DiskTier(tmp_path / "cache", max_chunks=2, slot_bytes=1 << 20) as tier:
        assert tier.write(chunk)
    _, records = read_folder(tmp_path / "cache")
    record = records[chunk.prefix_hash]
    found = disk_reader.decoded(record)
    for (keys, values), wanted in zip(found, chunk.past_key_values, strict=True):
        for array, tensor in ((keys, wanted[0]), (values, wanted[1])):
            assert np.allclose(array, tensor[0].numpy(), rtol=1e-5, atol=1e-5)


def test_the_second_reader_notices_damage(tmp_path: Path) -> None:
    with DiskTier(tmp_path / "cache", max_chunks=2, slot_bytes=SLOT_BYTES) as tier:
        assert tier.write(chunk_of(0))
        header = tier.entries()[0].header
    path = tmp_path / "cache" / "slots.bin"
    whole = path.read_bytes()
    assert read_slot(tmp_path / "cache", 0, SLOT_BYTES).meta["key"] == key_of(0)
    for place in (0, 9, 30, 60, len(header.raw) - 1, header.payload_start, header.record_bytes - 1):
        damaged = bytearray(whole)
        damaged[place] ^= 0x20
        path.write_bytes(damaged)
        with pytest.raises(FormatError):
            read_slot(tmp_path / "cache", 0, SLOT_BYTES)


def test_the_document_names_what_the_code_uses() -> None:
    for table in disk_index._SCHEMA:
        text = table.replace("IF NOT EXISTS ", "")
        assert text in " ".join(DOCUMENT.split()), text
    assert f"This is format version {serde.VERSION}" in DOCUMENT
    assert serde.VERSION == disk_folder.VERSION
    for name in (*serde.KINDS, *serde._DTYPES):
        assert f"`{name}`" in DOCUMENT or f'`"{name}"`' in DOCUMENT, name
    assert serde._FIXED.format in DOCUMENT
    assert f"{serde.ALIGNMENT:,}" in DOCUMENT
    meta = serde.to_record(chunk_of(0)).header.meta
    for name in meta:
        assert f"`{name}`" in DOCUMENT, name


def test_the_document_names_every_file_of_a_folder(tmp_path: Path) -> None:
    with DiskTier(tmp_path / "cache", max_chunks=2, slot_bytes=SLOT_BYTES) as tier:
        assert tier.write(chunk_of(0))
        for path in (tmp_path / "cache").iterdir():
            assert f"`{path.name}`" in DOCUMENT, path.name


def test_every_kind_is_read_by_the_second_reader(tmp_path: Path) -> None:
    state = {"conv": torch.randn(3, 4), "codes": torch.arange(5, dtype=torch.uint8)}
    records = [
        serde.record_of("state", "s", state, [1, 2], about={"layer": 1}),
        serde.record_of("opaque", "o", {"block": torch.randn(2, 2).bfloat16()}),
        serde.to_record(chunk_of(0)),
    ]
    with DiskTier(tmp_path / "cache", max_chunks=4, slot_bytes=SLOT_BYTES) as tier:
        assert tier.write_records(records) == [True] * 3
        for name, tensor in (tier.read_tensors("s") or {}).items():
            assert torch.equal(tensor, state[name])
        assert tier.load_or_reason("s") == "other encoding"
    settings, found = read_folder(tmp_path / "cache")
    assert settings["version"] == serde.VERSION
    assert {record.kind: record.token_ids for record in found.values()} == {
        "state": [1, 2],
        "opaque": [],
        "kv": list(chunk_of(0).token_ids),
    }
    assert found["s"].meta["about"] == {"layer": 1}
    for name, (dtype, shape, piece) in found["s"].tensors().items():
        wanted = state[name].numpy()
        assert np.array_equal(np.frombuffer(piece, np.dtype(dtype)).reshape(shape), wanted)


# --- the version before --------------------------------------------------------------------------


@pytest.fixture
def old_folder(tmp_path: Path) -> Path:
    """A folder that kvboost wrote when this was version 1: three chunks, room for one more."""
    return shutil.copytree(ROOT / "tests" / "data" / "disk-v1", tmp_path / "old")


def test_an_old_folder_is_read_and_written_as_it_was(old_folder: Path) -> None:
    with DiskTier(old_folder, max_chunks=4, slot_bytes=SLOT_BYTES) as tier:
        assert tier.misses == {}
        for number in range(3):
            chunk = tier.read(key_of(number))
            assert chunk is not None
            assert is_right(chunk, number)
        assert tier.write(chunk_of(3))
        assert tier.write_records([serde.record_of("state", "s", {"a": torch.zeros(2)})]) == [False]
        assert tier.stats()["refused"] == {"a folder of version 1 holds chunks only": 1}
        assert tier.check().is_good
    settings, records = read_folder(old_folder)
    assert settings["version"] == 1
    assert {record.version for record in records.values()} == {1}, "an older kvboost still reads it"
    assert len(records) == 4


def test_an_old_folder_whose_index_is_lost_is_found_again(old_folder: Path) -> None:
    (old_folder / "index.sqlite").unlink()
    with DiskTier(old_folder, max_chunks=4, slot_bytes=SLOT_BYTES) as tier:
        assert len(tier) == 3
        assert all(is_right(chunk, number) for number in range(3) if (chunk := tier.read(key_of(number))))
    assert read_folder(old_folder)[0]["version"] == 1


def test_a_folder_of_a_later_version_is_refused_and_left_as_it_is(old_folder: Path) -> None:
    fields = disk_folder.read_description(old_folder)
    assert fields is not None
    later = {**fields, "version": 3}
    text = json.dumps({**later, "check": disk_folder.seal(later)})
    (old_folder / "tier.json").write_text(text)
    with pytest.raises(CacheFileError, match="version 3, this kvboost reads up to 2"):
        DiskTier(old_folder, max_chunks=4, slot_bytes=SLOT_BYTES)
    assert (old_folder / "tier.json").read_text() == text
