"""Saved caches that were damaged: fewer chunks or a clear refusal, never wrong KV."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.disk import snapshot
from kvboost.errors import CacheFileError
from kvboost.identity.namespace import Namespace
from kvboost.store.manager import KVCacheManager
from tests.unit.fake_kv import CODEC, TOKEN_SIZE, check_cover, check_kv, store

CHUNK = 4
NAMESPACES = (Namespace("a" * 64, "family", "mine"), Namespace("b" * 64, "family", "theirs"))
TEXTS = ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 15, 16], [21, 22, 23])
CHUNKS = 2 * 5  # in each namespace: two chunks and a tail, a tail, a tail


def filled() -> KVCacheManager:
    manager = KVCacheManager(None, None, chunk_size=CHUNK)
    for namespace in NAMESPACES:
        for tokens in TEXTS:
            store(manager, tokens, namespace)
    assert len(manager) == CHUNKS
    return manager


def save(folder: Path) -> int:
    return snapshot.save(folder, filled(), CODEC, "family", "tiny", progress=False)


def load(folder: Path, manager: KVCacheManager | None = None) -> tuple[KVCacheManager, snapshot.LoadReport]:
    manager = manager or KVCacheManager(None, None, chunk_size=CHUNK)
    report = snapshot.load(folder, manager, CODEC, "family", "tiny", progress=False)
    manager.check_integrity()
    return manager, report


def check(manager: KVCacheManager) -> int:
    """Everything that is found must be right; returns how many tokens are."""
    found = 0
    for namespace in NAMESPACES:
        for tokens in TEXTS:
            match = manager.match_prefix(tokens, namespace)
            check_cover(match.matches, match.length)
            check_kv(match.matches, tokens)
            for part in match.matches:
                assert (part.chunk.position_start, part.chunk.position_end) == (
                    part.start,
                    part.start + part.chunk.length,
                )
            found += match.length
    return found


ALL_TOKENS = check(filled())


@lru_cache
def saved_files() -> dict[str, bytes]:
    """The files of one save: the same bytes in every example."""
    with tempfile.TemporaryDirectory() as name:
        save(Path(name))
        return {path.name: path.read_bytes() for path in Path(name).iterdir()}


def load_with(name: str, content: bytes) -> tuple[KVCacheManager, snapshot.LoadReport]:
    """Load the saved files with one of them changed."""
    with tempfile.TemporaryDirectory() as folder:
        for file, saved in saved_files().items():
            (Path(folder) / file).write_bytes(content if file == name else saved)
        return load(Path(folder))


def shard_of(folder: Path) -> Path:
    (shard,) = folder.glob("chunks-*")
    return shard


@pytest.fixture
def old_cache(tmp_path: Path) -> Path:
    """What `save` wrote here when its format had version 3."""
    return shutil.copytree(Path(__file__).parents[1] / "data" / "snapshot-v3", tmp_path / "old")


def change_header(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / snapshot.HEADER
    header = json.loads(path.read_text())
    change(header)
    path.write_text(json.dumps(header))


def test_an_undamaged_cache_comes_back_whole(tmp_path: Path) -> None:
    assert save(tmp_path) == CHUNKS
    manager, report = load(tmp_path)
    assert (report.loaded, report.corrupt, report.no_room) == (CHUNKS, 0, 0)
    assert check(manager) == ALL_TOKENS


@given(place=st.integers(0, 10**6), flip=st.integers(1, 255))
@settings(deadline=None, max_examples=100)
def test_a_flipped_byte_in_the_tensors_never_gives_wrong_kv(place: int, flip: int) -> None:
    name = next(name for name in saved_files() if name.startswith("chunks-"))
    content = bytearray(saved_files()[name])
    content[place % len(content)] ^= flip
    manager, report = load_with(name, bytes(content))
    assert report.loaded + report.corrupt + report.no_room == CHUNKS
    assert manager.stats()["chunks"] == report.loaded
    check(manager)


@given(place=st.integers(0, 10**6), byte=st.sampled_from(b'0a"{}[],:x-'))
@settings(deadline=None, max_examples=100)
def test_a_changed_byte_in_the_header_is_refused_or_costs_chunks(place: int, byte: int) -> None:
    content = bytearray(saved_files()[snapshot.HEADER])
    content[place % len(content)] = byte
    try:
        manager, _ = load_with(snapshot.HEADER, bytes(content))
    except CacheFileError:
        return
    check(manager)


@pytest.mark.parametrize(("part", "loaded"), [(0, 0), (1, 0), (8, 0), (100, 0), (-1, CHUNKS - 1)])
def test_what_was_cut_off_a_shard_is_left_out(tmp_path: Path, part: int, loaded: int) -> None:
    save(tmp_path)
    shard = shard_of(tmp_path)
    shard.write_bytes(shard.read_bytes()[:part])
    manager, report = load(tmp_path)
    assert (report.loaded, report.corrupt) == (loaded, CHUNKS - loaded)
    assert (check(manager) == 0) == (loaded == 0)


def test_a_missing_shard_is_left_out(tmp_path: Path) -> None:
    save(tmp_path)
    shard_of(tmp_path).unlink()
    _, report = load(tmp_path)
    assert (report.loaded, report.corrupt) == (0, CHUNKS)


@pytest.mark.parametrize(
    "wrong",
    [
        "text",
        None,
        7,
        [],
        {},
        {"key": "x"},
        {"shard": 5},
        {"shard": None, "key": "x"},
        {"shard": "nowhere.records", "key": ["x"]},
        {"shard": "chunks-a-0.records", "key": "x", "offset": 0, "size": 10},
        {"shard": "chunks-a-0.records", "key": "x", "offset": -4096, "size": 10},
        {"shard": "chunks-a-0.records", "key": "x", "offset": 2**70, "size": 2**70},
        {"shard": "chunks-a-0.records", "key": "x", "offset": True, "size": True},
    ],
    ids=repr,
)
def test_rows_that_make_no_sense_are_refused_or_left_out(tmp_path: Path, wrong: Any) -> None:
    save(tmp_path)
    change_header(tmp_path, lambda header: header["chunks"].insert(0, wrong))
    try:
        manager, report = load(tmp_path)
    except CacheFileError:
        return
    assert (report.loaded, report.corrupt) == (CHUNKS, 1)
    assert check(manager) == ALL_TOKENS


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("key", "d" * 64),
        ("key", None),
        ("offset", 4_096),
        ("offset", 1),
        ("offset", -1),
        ("offset", "0"),
        ("size", 0),
        ("size", 2**62),
        ("size", 4_096),
        ("shard", "chunks-0-0.records"),
    ],
)
def test_a_changed_field_of_a_chunk_is_noticed(tmp_path: Path, field: str, value: Any) -> None:
    """At worst that chunk, and what follows it, is not there."""
    save(tmp_path)
    change_header(tmp_path, lambda header: header["chunks"][0].update({field: value}))
    try:
        manager, report = load(tmp_path)
    except CacheFileError:
        return
    assert report.loaded < CHUNKS
    check(manager)


def test_rows_in_another_order_lose_nothing_but_what_has_no_parent_yet(tmp_path: Path) -> None:
    save(tmp_path)
    change_header(tmp_path, lambda header: header["chunks"].reverse())
    try:
        manager, report = load(tmp_path)
    except CacheFileError:
        return
    assert 0 < report.loaded <= CHUNKS
    check(manager)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"format": "other"}', "\x00\xff"])
def test_a_header_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    save(tmp_path)
    (tmp_path / snapshot.HEADER).write_text(content)
    with pytest.raises(CacheFileError):
        load(tmp_path)


def test_a_header_that_is_no_text_is_refused(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / snapshot.HEADER).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CacheFileError):
        load(tmp_path)


def test_a_save_that_fails_leaves_the_one_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path)
    manager = filled()
    store(manager, [31, 32, 33], NAMESPACES[0])
    with monkeypatch.context() as patch:

        def disk_full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(snapshot.os, "replace", disk_full)
        with pytest.raises(OSError, match="No space left"):
            snapshot.save(tmp_path, manager, CODEC, "family", "tiny", progress=False)
    manager.check_integrity()
    manager.clear()
    assert len(manager) == 0, "nothing is held any more"
    again, report = load(tmp_path)
    assert report.loaded == CHUNKS
    assert check(again) == ALL_TOKENS


def test_loading_stays_in_the_budget_and_evicts_nothing(tmp_path: Path) -> None:
    save(tmp_path)
    mine = [90, 91, 92, 93]
    manager = KVCacheManager(None, 10 * TOKEN_SIZE, chunk_size=CHUNK)
    store(manager, mine, NAMESPACES[0])
    _, report = load(tmp_path, manager)
    assert report.no_room > 0
    assert report.loaded + report.no_room == CHUNKS
    assert manager.stats()["bytes"] <= 10 * TOKEN_SIZE
    assert manager.match_prefix(mine, NAMESPACES[0]).length == 4
    check(manager)


def test_loading_twice_changes_nothing(tmp_path: Path) -> None:
    save(tmp_path)
    manager, _ = load(tmp_path)
    before = manager.stats()["bytes"]
    load(tmp_path, manager)
    assert manager.stats()["bytes"] == before
    assert check(manager) == ALL_TOKENS


# --- what somebody else put there ------------------------------------------------------------------


@pytest.mark.parametrize(
    "where", ["../outside/{}", "{outside}/{}", "sub/../../outside/{}", "", "..", "sub/{}", "{}x"]
)
def test_a_shard_outside_the_folder_is_not_opened(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured before: a header could name any file as a shard, and it was read."""
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    save(inside)
    outside.mkdir()
    shard = shard_of(inside)
    shard.rename(outside / shard.name)
    name = where.format(shard.name, outside=outside)

    def point_outside(header: dict[str, Any]) -> None:
        for row in header["chunks"]:
            row["shard"] = name

    change_header(inside, point_outside)
    opened: list[str] = []
    real = os.open

    def noted(path: Any, *arguments: Any, **options: Any) -> int:
        opened.append(Path(path).name)
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", noted)
    manager, report = load(inside)
    assert (report.loaded, report.corrupt) == (0, CHUNKS)
    assert check(manager) == 0
    assert opened == [snapshot.HEADER]


def test_a_link_in_place_of_a_shard_is_a_damaged_shard(tmp_path: Path) -> None:
    save(tmp_path / "saved")
    shard = shard_of(tmp_path / "saved")
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    _, report = load(tmp_path / "saved")
    assert (report.loaded, report.corrupt) == (0, CHUNKS)


def test_a_link_in_place_of_the_header_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "saved")
    header = tmp_path / "saved" / snapshot.HEADER
    header.rename(tmp_path / "elsewhere")
    header.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CacheFileError, match="is a link"):
        load(tmp_path / "saved")


@pytest.mark.timeout(20)
def test_fifos_hang_nothing(tmp_path: Path) -> None:
    save(tmp_path)
    shard = shard_of(tmp_path)
    shard.unlink()
    os.mkfifo(shard)
    _, report = load(tmp_path)
    assert (report.loaded, report.corrupt) == (0, CHUNKS)
    (tmp_path / snapshot.HEADER).unlink()
    os.mkfifo(tmp_path / snapshot.HEADER)
    with pytest.raises(CacheFileError, match="no regular file"):
        load(tmp_path)


@pytest.mark.parametrize("name", [f"{snapshot.HEADER}.{'a' * 12}", f"chunks-{'a' * 12}-00000.records"])
def test_saving_writes_over_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where somebody guessed the name of a file that is to be made."""
    save(tmp_path / "saved")
    (tmp_path / "thesis").write_text("ten years of work")
    (tmp_path / "saved" / name).symlink_to(tmp_path / "thesis")
    monkeypatch.setattr(snapshot.uuid, "uuid4", lambda: uuid.UUID("a" * 32))
    with pytest.raises((OSError, CacheFileError)):
        save(tmp_path / "saved")
    assert (tmp_path / "thesis").read_text() == "ten years of work"
    assert load(tmp_path / "saved")[1].loaded == CHUNKS


def test_a_header_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / snapshot.HEADER).write_text("[" * 200_000)
    with pytest.raises(CacheFileError, match="cannot be read"):
        load(tmp_path)


def test_saving_again_removes_its_own_files_only(tmp_path: Path) -> None:
    save(tmp_path)
    mine = [f"{snapshot.HEADER}.bak", "chunks-notes.records", "chunks-1-2.records.old"]
    for name in mine:
        (tmp_path / name).write_text("mine")
    left_over = [
        f"{snapshot.HEADER}.{'a' * 12}",
        f"chunks-{'a' * 12}-00000.records",
        f"chunks-{'a' * 12}-00000.safetensors",
    ]
    for name in left_over:
        (tmp_path / name).touch()
    save(tmp_path)
    assert all((tmp_path / name).read_text() == "mine" for name in mine)
    assert not any((tmp_path / name).exists() for name in left_over)
    assert load(tmp_path)[1].loaded == CHUNKS


def test_records_that_changed_places_are_damage(tmp_path: Path) -> None:
    save(tmp_path)

    def swap(header: dict[str, Any]) -> None:
        one, other = header["chunks"][0], header["chunks"][1]
        one["offset"], other["offset"] = other["offset"], one["offset"]

    change_header(tmp_path, swap)
    manager, report = load(tmp_path)
    assert report.corrupt >= 2
    check(manager)


# --- the version before ----------------------------------------------------------------------------


def test_a_cache_of_the_version_before_comes_back_whole(old_cache: Path) -> None:
    manager, report = load(old_cache)
    assert (report.loaded, report.corrupt, report.no_room) == (CHUNKS, 0, 0)
    assert check(manager) == ALL_TOKENS
    assert save(old_cache) == CHUNKS
    assert [path.suffix for path in old_cache.glob("chunks-*")] == [".records"], "it is written anew"
    assert load(old_cache)[1].loaded == CHUNKS


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("position_start", 3),
        ("position_start", -1),
        ("position_start", "0"),
        ("length", 5),
        ("parent", "a" * 63),
        ("parent", None),
        ("namespace", "c" * 64),
        ("namespace", 5),
        ("checksum", ""),
        ("key", "d" * 64),
        ("access_count", "many"),
        ("shard", "../chunks-0-0.safetensors"),
    ],
)
def test_a_changed_field_of_an_old_chunk_is_noticed(old_cache: Path, field: str, value: Any) -> None:
    change_header(old_cache, lambda header: header["chunks"][0].update({field: value}))
    manager, report = load(old_cache)
    assert report.loaded < CHUNKS
    check(manager)


@pytest.mark.parametrize("place", range(0, 7_500, 250))
def test_a_flipped_byte_in_an_old_shard_never_gives_wrong_kv(old_cache: Path, place: int) -> None:
    content = bytearray(shard_of(old_cache).read_bytes())
    content[place] ^= 0x41
    shard_of(old_cache).write_bytes(content)
    check(load(old_cache)[0])


def test_token_ids_that_turned_negative_are_left_out(old_cache: Path) -> None:
    """The highest bit of an id, as a broken memory cell would flip it."""
    tensors = safetensors.torch.load_file(shard_of(old_cache))
    damaged = next(name for name in tensors if name.endswith(".ids"))
    tensors[damaged][0] -= 2**31
    safetensors.torch.save_file(tensors, shard_of(old_cache))
    manager, report = load(old_cache)
    assert report.corrupt == 1
    check(manager)


@pytest.mark.parametrize("change", ["long", "float", "column", "scalar", "bool"])
def test_token_ids_of_another_kind_are_damage(change: str, old_cache: Path) -> None:
    shard = shard_of(old_cache)
    changes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "long": lambda ids: ids.long(),
        "float": lambda ids: ids.float(),
        "column": lambda ids: ids.view(-1, 1),
        "scalar": lambda ids: ids.sum(),
        "bool": lambda ids: ids > 0,
    }
    tensors = {
        name: changes[change](tensor).contiguous() if name.endswith(".ids") else tensor
        for name, tensor in safetensors.torch.load_file(shard).items()
    }
    safetensors.torch.save_file(tensors, shard)
    manager, report = load(old_cache)
    assert (report.loaded, report.corrupt) == (0, CHUNKS)
    assert check(manager) == 0
