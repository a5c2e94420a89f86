"""Slots that grow step by step, within one budget for all models of a folder, on disks that fill up."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import sqlite3
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvboost.disk import room as disk_room
from kvboost.disk import tier as disk_tier
from kvboost.disk.folder import DESCRIPTION, OWNERS
from kvboost.disk.index import DiskIndex
from kvboost.disk.room import GROWING, Room
from kvboost.disk.serde import to_record
from kvboost.disk.tier import INDEX, SLOTS, DiskTier
from kvboost.errors import CacheFileError
from tests import disk_reader
from tests.faults import test_disk_faults
from tests.faults.disk_writer import SLOT_BYTES, Job, Writers, chunk_of, is_right, key_of
from tests.faults.test_disk_faults import FOREVER, Faults
from tests.fixture_types import MakeEngine
from tests.tiny_models import random_ids, tiny_model

ENGINE_SLOT_BYTES = 16_384  # of a chunk of 16 tokens of the tiny llama


@pytest.fixture(scope="module")
def writers() -> Iterator[Writers]:
    with Writers() as started:
        yield started


def open_tier(folder: Path, max_chunks: int = 256, room: Room | None = None) -> DiskTier:
    return DiskTier(folder, max_chunks=max_chunks, slot_bytes=SLOT_BYTES, grows=True, room=room)


def slots_in(folder: Path, slot_bytes: int = SLOT_BYTES) -> int:
    """Slots that are set aside, all of them with their blocks on disk, as index and file agree."""
    found = (folder / SLOTS).stat()
    assert found.st_size % slot_bytes == 0
    assert found.st_blocks * 512 >= found.st_size
    connection = sqlite3.connect(folder / INDEX)
    try:
        (number,) = connection.execute("SELECT value FROM meta WHERE name = 'num_slots'").fetchone()
    finally:
        connection.close()
    assert number == found.st_size // slot_bytes
    return int(number)


def write(tier: DiskTier, numbers: range) -> list[int]:
    """The numbers of the chunks that were written, all of which can be read."""
    written = [number for number in numbers if tier.write(chunk_of(number))]
    for number in written[-4:]:
        found = tier.read(key_of(number))
        assert found is not None
        assert is_right(found, number)
    return written


def held(tier: DiskTier, numbers: range) -> list[int]:
    found = {number: tier.read(key_of(number)) for number in numbers}
    assert all(chunk is None or is_right(chunk, number) for number, chunk in found.items())
    return [number for number, chunk in found.items() if chunk is not None]


# --- steps -----------------------------------------------------------------------------------------


def test_nothing_is_set_aside_before_it_is_needed(tmp_path: Path) -> None:
    with open_tier(tmp_path / "tier") as tier:
        assert slots_in(tier.folder) == 0
        assert tier.stats()["allocated_bytes"] == 0
        assert write(tier, range(1)) == [0]
        assert slots_in(tier.folder) == 8
        assert tier.stats()["allocated_bytes"] == 8 * SLOT_BYTES
        assert (tier.stats()["max_chunks"], tier.check().free) == (256, 255)


def test_steps_grow_with_what_is_there_up_to_the_budget(tmp_path: Path) -> None:
    seen = []
    with open_tier(tmp_path / "tier", max_chunks=70) as tier:
        for number in range(90):
            assert tier.write(chunk_of(number))
            seen.append(slots_in(tier.folder))
        assert len(tier) == 70
        assert held(tier, range(90)) == list(range(20, 90))
    assert sorted(set(seen)) == [8, 16, 24, 32, 40, 50, 62, 70]


def test_a_batch_larger_than_a_step_gets_what_it_needs(tmp_path: Path) -> None:
    with open_tier(tmp_path / "tier") as tier:
        assert all(tier.write_records([to_record(chunk_of(number)) for number in range(30)]))
        assert slots_in(tier.folder) == 30


def test_a_step_of_large_slots_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_room, "_MOST_STEP_BYTES", 2 * SLOT_BYTES)
    with open_tier(tmp_path / "tier") as tier:
        write(tier, range(3))
        assert slots_in(tier.folder) == 4


def test_what_is_there_stays_when_it_is_opened_again(tmp_path: Path) -> None:
    with open_tier(tmp_path / "tier") as tier:
        write(tier, range(10))
    for _ in range(2):
        with open_tier(tmp_path / "tier") as tier:
            assert slots_in(tier.folder) == 16
            assert held(tier, range(10)) == list(range(10))
    with DiskTier.existing(tmp_path / "tier") as tier:
        assert slots_in(tier.folder) == 16
    settings, records = disk_reader.read_folder(tmp_path / "tier")
    assert (settings["max_chunks"], len(records)) == (256, 10)


def test_a_tier_made_directly_is_set_aside_in_full(tmp_path: Path) -> None:
    """And either kind opens what the other made."""
    with open_tier(tmp_path / "tier") as tier:
        write(tier, range(3))
    with DiskTier(tmp_path / "tier", max_chunks=20, slot_bytes=SLOT_BYTES) as tier:
        assert slots_in(tier.folder) == 20
        assert held(tier, range(3)) == [0, 1, 2]
    with open_tier(tmp_path / "tier", max_chunks=30) as tier:
        assert slots_in(tier.folder) == 20
        assert len(write(tier, range(3, 30))) == 27
        assert slots_in(tier.folder) == 30
    with open_tier(tmp_path / "tier", max_chunks=5) as tier:
        assert slots_in(tier.folder) == 5


def test_clear_gives_everything_back(tmp_path: Path) -> None:
    with open_tier(tmp_path / "tier") as tier, open_tier(tmp_path / "tier") as other:
        write(tier, range(20))
        tier.clear()
        assert slots_in(tier.folder) == 0
        assert write(other, range(20, 23)) == [20, 21, 22]
        assert slots_in(tier.folder) == 8
        assert held(tier, range(25)) == [20, 21, 22]


@pytest.mark.parametrize("lost", ["index", "number", "file"])
def test_what_was_lost_is_made_anew_from_what_the_file_holds(lost: str, tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    with open_tier(folder) as tier:
        write(tier, range(20))
    if lost == "index":
        (folder / INDEX).write_bytes(b"garbage" * 500)
        with pytest.warns(UserWarning, match="is damaged"):
            tier = open_tier(folder)
    elif lost == "number":
        connection = sqlite3.connect(folder / INDEX)
        connection.execute("DELETE FROM meta")
        connection.commit()
        connection.close()
        tier = open_tier(folder)
    else:
        os.truncate(folder / SLOTS, 5 * SLOT_BYTES)
        tier = open_tier(folder)
    with tier:
        assert slots_in(folder) == (5 if lost == "file" else 24), "what the file lost may be another's by now"
        assert held(tier, range(20)) == list(range(5 if lost == "file" else 20))
        assert write(tier, range(20, 40)) == list(range(20, 40))


def test_a_step_that_was_never_entered_is_given_back(tmp_path: Path) -> None:
    """A process died between setting slots aside and saying so."""
    with open_tier(tmp_path / "tier") as tier:
        write(tier, range(3))
    os.truncate(tmp_path / "tier" / SLOTS, 50 * SLOT_BYTES)
    with open_tier(tmp_path / "tier") as tier:
        assert slots_in(tier.folder) == 8
        assert held(tier, range(3)) == [0, 1, 2]


def test_looking_at_a_folder_drops_nothing(tmp_path: Path) -> None:
    """Whoever opened it last may have had a smaller budget."""
    with open_tier(tmp_path / "tier", max_chunks=60) as large, open_tier(tmp_path / "tier", max_chunks=10):
        write(large, range(40))
    with DiskTier.existing(tmp_path / "tier") as tier:
        assert len(tier) == 40
    with open_tier(tmp_path / "tier", max_chunks=60) as large:
        assert held(large, range(40)) == list(range(40))


# --- disks that are full ---------------------------------------------------------------------------


class FullDisk:
    """`posix_fallocate` that takes half of what it was asked for, and then fails as a full disk does."""

    def __init__(self, number: int = errno.ENOSPC, room_bytes: int = 0) -> None:
        self.calls = 0
        self._number = number
        self._room_bytes = room_bytes
        self._real = os.posix_fallocate

    def __call__(self, fd: int, start: int, length: int) -> None:
        self.calls += 1
        if start + length <= self._room_bytes:
            self._real(fd, start, length)
            return
        self._real(fd, start, length // 2)
        raise OSError(self._number, os.strerror(self._number))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO], ids=errno.errorcode.get)
def test_a_step_that_fails_is_counted_said_once_and_given_back(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with open_tier(tmp_path / "tier") as tier:
        write(tier, range(8))
        full = FullDisk(number)
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            patch.setattr(os, "posix_fallocate", full)
            assert write(tier, range(8, 40)) == list(range(8, 40)), "what is there is used on"
        assert full.calls == 2, "a step, a smaller one, and then not for a while"
        assert slots_in(tier.folder) == 8
        (reason,) = tier.stats()["refused"]
        assert os.strerror(number) in reason
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert os.strerror(number) in caplog.text
        tier._growth._rests_until = 0.0  # type: ignore[union-attr]
        write(tier, range(40, 48))
        assert slots_in(tier.folder) == 16


def test_a_disk_that_is_full_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", FullDisk())
    with open_tier(tmp_path / "tier") as tier:
        assert write(tier, range(20)) == []
        assert slots_in(tier.folder) == 0
        refused = tier.stats()["refused"]
        assert sum(refused.values()) == 21  # the step, and every chunk
        assert all("No space left" in reason for reason in refused)


def test_a_smaller_step_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", FullDisk(room_bytes=3 * SLOT_BYTES))
    with open_tier(tmp_path / "tier") as tier:
        assert write(tier, range(1)) == [0]
        assert slots_in(tier.folder) == 1
        assert tier.stats()["refused"] == {}


def test_an_index_that_finds_no_room_gives_the_step_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_index: DiskIndex, _slots: int) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with open_tier(tmp_path / "tier") as tier:
        write(tier, range(8))
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            patch.setattr(DiskIndex, "set_slots", full)
            assert write(tier, range(8, 20)) == list(range(8, 20)), "what is there is used on"
        assert slots_in(tier.folder) == 8
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert tier.stats()["refused"] == {"no room: database or disk is full": 1}


def test_the_last_bytes_of_a_disk_are_left_to_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(tmp_path)
    room = (8 << 20) + 3 * SLOT_BYTES
    little = os.statvfs_result((room, 1, 1 << 40, room, room, *tuple(real)[5:]))
    with open_tier(tmp_path / "tier") as tier, monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda _path: little)
        write(tier, range(1))
        assert slots_in(tier.folder) == 3


def test_a_full_disk_never_comes_out_of_generate(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", FullDisk())
    with make_engine(disk_cache_dir=tmp_path / "disk") as engine:
        text = random_ids(64, seed=1)
        engine.warm(text)
        assert engine.generate([*text, 7], max_new_tokens=2).cached_tokens == 64
        assert engine.core.parts.disk is not None
        assert engine.core.parts.disk.flush(10.0)
        stats = engine.cache_stats()["disk"]
        assert (stats["chunks"], stats["allocated_bytes"], stats["unsaved_chunks"]) == (0, 0, 0)
        assert any("No space left" in reason for reason in stats["refused"])


# --- several processes -----------------------------------------------------------------------------


def test_neighbours_see_each_others_steps(tmp_path: Path) -> None:
    with open_tier(tmp_path / "tier") as one, open_tier(tmp_path / "tier") as two:
        for number in range(0, 40, 2):
            assert one.write(chunk_of(number))
            assert two.write(chunk_of(number + 1))
        assert held(one, range(40)) == held(two, range(40)) == list(range(40))
        assert slots_in(one.folder) == 40
        assert one.check().is_good


def test_a_smaller_budget_takes_no_slots_from_a_neighbour(tmp_path: Path) -> None:
    """It shrinks when it is alone; until then it uses what is there, and does not grow it."""
    with open_tier(tmp_path / "tier") as large:
        write(large, range(12))
        with open_tier(tmp_path / "tier", max_chunks=4) as small:
            assert slots_in(large.folder) == 16
            assert held(small, range(12)) == list(range(12))
            assert write(small, range(12, 30)) == list(range(12, 30))
            assert slots_in(large.folder) == 16
            assert len(held(large, range(30))) == 16
            assert small.check().is_good
        write(large, range(30, 50))
        assert slots_in(large.folder) == 40
        assert large.check().is_good
    with open_tier(tmp_path / "tier", max_chunks=4) as small:
        assert slots_in(small.folder) == 4
        assert len(small) <= 4
        assert small.check().is_good


def test_writers_that_grow_are_killed(writers: Writers, tmp_path: Path) -> None:
    """Whatever moment it was, the next one opens the folder and finds whole chunks only."""
    draw = random.Random(3)
    folder, report = tmp_path / "disk" / "tier", tmp_path / "report.txt"
    for kill in range(20):
        pid = writers.start(Job(str(folder), 60, 90, kill, 60.0, str(report), grows=True))
        time.sleep(draw.choice((0.03, 0.1, 0.3)) * draw.random())
        status = writers.kill(pid)
        assert status == -9, report.read_text() if report.exists() else status
        with open_tier(folder, max_chunks=60) as tier:
            assert tier.check().is_good
            assert len(held(tier, range(90))) == len(tier) <= slots_in(folder) <= 60
            if kill % 5 == 4:
                tier.clear()


def test_processes_that_grow_one_folder_together(writers: Writers, tmp_path: Path) -> None:
    folder = tmp_path / "disk" / "tier"
    reports = [tmp_path / f"report{number}.txt" for number in range(3)]
    pids = [
        writers.start(Job(str(folder), 30 + 20 * number, 90, number, 4.0, str(report), grows=True))
        for number, report in enumerate(reports)
    ]
    statuses = [writers.wait(pid) for pid in pids]
    told = "".join(path.read_text() for path in reports if path.exists())
    assert (statuses, told) == ([0] * 3, "")
    with open_tier(folder, max_chunks=70) as tier:
        assert tier.check().is_good
        assert len(held(tier, range(90))) == len(tier) <= slots_in(folder) <= 70


@pytest.mark.parametrize("length", [1, FOREVER], ids=["once", "from_then_on"])
@pytest.mark.parametrize(
    ("name", "how"), [("posix_fallocate", "ENOSPC"), ("open", "EIO"), ("pwritev", "EIO")], ids=str
)
def test_every_call_of_the_system_failing_in_turn(
    name: str, how: str, length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def install(faults: Faults) -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(os, name, test_disk_faults._bad_call(name, how, faults, tmp_path))
            yield

    with as_it_grows(monkeypatch):
        assert test_disk_faults.for_all_n(tmp_path, install, length) >= 1


@pytest.mark.parametrize("length", [1, FOREVER], ids=["once", "from_then_on"])
def test_every_statement_of_the_index_failing_in_turn(
    length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = DiskIndex._execute

    @contextlib.contextmanager
    def install(faults: Faults) -> Iterator[None]:
        def execute(index: DiskIndex, statement: str, values: Sequence[object] = ()) -> sqlite3.Cursor:
            if faults.strikes():
                raise sqlite3.OperationalError("disk I/O error")
            return real(index, statement, values)

        with monkeypatch.context() as patch:
            patch.setattr(DiskIndex, "_execute", execute)
            yield

    with as_it_grows(monkeypatch):
        assert test_disk_faults.for_all_n(tmp_path, install, length) > 100


@contextlib.contextmanager
def as_it_grows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The scripts of the other fault tests on folders that grow by one slot, and try again at once."""
    with monkeypatch.context() as patch:
        patch.setattr(
            test_disk_faults, "open_tier", partial(open_tier, max_chunks=test_disk_faults.MAX_CHUNKS)
        )
        patch.setattr(disk_room, "_REST_S", 0.0)
        patch.setattr(disk_room, "_LEAST_STEP", 1)
        yield


# --- one budget for all models ---------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(disk_room, "_ROOM_REST_S", 0.0)
    (tmp_path / "disk").mkdir(mode=0o700)
    return tmp_path / "disk"


def in_room(disk: Path, name: str, slots: int) -> DiskTier:
    return open_tier(disk / name, max_chunks=slots, room=Room(disk, slots * SLOT_BYTES + 100))


def all_slots(disk: Path) -> int:
    return sum(path.stat().st_size for path in disk.rglob(SLOTS)) // SLOT_BYTES


def test_models_in_use_share_one_budget(disk: Path) -> None:
    with in_room(disk, "a", 20) as a, in_room(disk, "b", 20) as b, in_room(disk, "c", 20) as c:
        assert write(a, range(12)) == list(range(12))
        assert all_slots(disk) == 16
        assert write(b, range(100, 110)) == list(range(100, 110)), "it evicts within its own slots"
        assert (slots_in(a.folder), slots_in(b.folder)) == (16, 4)
        assert held(b, range(100, 110)) == [106, 107, 108, 109]
        assert held(a, range(12)) == list(range(12)), "and takes none from a model in use"
        assert write(c, range(200, 203)) == []
        assert c.stats()["refused"] == {"no room: other models fill disk_cache_bytes": 3}
        assert all_slots(disk) == 20


def test_a_budget_that_was_lowered_takes_from_unused_models_first(disk: Path) -> None:
    with in_room(disk, "a", 60) as a, in_room(disk, "b", 60) as b:
        write(a, range(30))
        write(b, range(100, 120))
    with in_room(disk, "a", 35) as a:
        assert all_slots(disk) <= 35
        assert held(a, range(30)) == list(range(30)), "it is in use, and fits"
    with in_room(disk, "a", 10) as a:
        assert slots_in(a.folder) == all_slots(disk) == 10


def test_slots_that_the_file_lost_are_not_taken_again_when_it_is_opened(disk: Path) -> None:
    """Another model may have them by now."""
    with in_room(disk, "a", 40) as a:
        write(a, range(32))
    os.truncate(disk / "a" / SLOTS, 0)
    with in_room(disk, "b", 40) as b:
        assert len(write(b, range(40))) == 40
        with in_room(disk, "a", 40) as a:
            assert all_slots(disk) == 40
            assert write(a, range(3)) == []
        assert held(b, range(40)) == list(range(40))


def test_clear_says_so_before_it_gives_slots_back(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies in between leaves a file that is too long, never one that is too short."""
    with in_room(disk, "a", 40) as a:
        write(a, range(8))
        seen = []
        real = os.ftruncate

        def truncate(fd: int, size: int) -> None:
            reader = sqlite3.connect(a.folder / INDEX)
            seen.append(reader.execute("SELECT value FROM meta WHERE name = 'num_slots'").fetchone()[0])
            reader.close()
            real(fd, size)

        with monkeypatch.context() as patch:
            patch.setattr(os, "ftruncate", truncate)
            a.clear()
        assert seen == [0]
        assert slots_in(a.folder) == 0


def test_clear_leaves_the_slots_that_another_process_writes_to(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_room(disk, "a", 40) as a, in_room(disk, "a", 40) as other, in_room(disk, "b", 40) as b:
        write(a, range(24))
        real = disk_tier.write_claimed

        def fill(index: DiskIndex, *rest: Any) -> Any:
            if index is a._index:
                other.clear()
                write(b, range(100, 140))
            return real(index, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(disk_tier, "write_claimed", fill)
            assert all(a.write_records([to_record(chunk_of(number)) for number in range(30, 33)]))
        assert all_slots(disk) <= 40
        assert held(other, range(40)) == [30, 31, 32]
        assert a.check().is_good
        other.clear()
        assert slots_in(a.folder) == 0


def test_a_chunk_whose_slot_was_given_back_meanwhile_is_refused(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_room(disk, "a", 40) as a:
        write(a, range(3))
        real = disk_tier.write_claimed

        def fill(*claimed: Any) -> Any:
            with a._index.transaction():
                a._index._execute("DELETE FROM claims")
            return real(*claimed)

        with monkeypatch.context() as patch:
            patch.setattr(disk_tier, "write_claimed", fill)
            assert not a.write(chunk_of(5))
        assert a.stats()["refused"] == {"its slot was given back meanwhile": 1}
        assert held(a, range(9)) == [0, 1, 2]


def test_a_step_of_a_killed_process_beside_a_living_one_is_given_back(disk: Path) -> None:
    with in_room(disk, "a", 40) as a:
        write(a, range(8))
        os.truncate(a.folder / SLOTS, 40 * SLOT_BYTES)
        assert len(write(a, range(100, 130))) == 30
        assert len(held(a, range(130))) == 38
        assert slots_in(a.folder) == all_slots(disk) == 40


def test_the_model_that_was_used_longest_ago_makes_room(disk: Path) -> None:
    for number, name in enumerate("abc"):
        with in_room(disk, name, 24) as tier:
            write(tier, range(8))
        os.utime(disk / name / DESCRIPTION, (1_000_000 + number, 1_000_000 + number))
    with in_room(disk, "a", 24) as a:
        a.touch([key_of(1)])
    with in_room(disk, "c", 24):  # in use, so it stays
        os.utime(disk / "c" / DESCRIPTION, (5, 5))
        with in_room(disk, "new", 24) as new:
            assert write(new, range(50, 53)) == [50, 51, 52]
            assert not (disk / "b" / SLOTS).exists(), "used longest ago, and not in use"
            assert not list((disk / "b").glob(f"{INDEX}*"))
            assert all_slots(disk) <= 24
            assert slots_in(disk / "a") == slots_in(disk / "c") == 8
    with in_room(disk, "a", 24) as a:
        assert held(a, range(8)) == list(range(8))
    with in_room(disk, "b", 24) as b:  # and it can be used again
        assert held(b, range(8)) == []
        assert write(b, range(3)) == [0, 1, 2]
        assert all_slots(disk) <= 24


def test_what_a_killed_process_had_open_is_taken_over(writers: Writers, disk: Path, tmp_path: Path) -> None:
    pid = writers.start(Job(str(disk / "dead"), 16, 90, 1, 60.0, str(tmp_path / "report.txt"), grows=True))
    until = time.monotonic() + 20
    while all_slots(disk) < 16 and time.monotonic() < until:
        time.sleep(0.01)
    assert all_slots(disk) == 16
    with in_room(disk, "new", 16) as new:
        assert write(new, range(3)) == []
        assert writers.kill(pid) == -9
        assert os.listdir(disk / "dead" / OWNERS)
        assert write(new, range(3)) == [0, 1, 2]
    assert all_slots(disk) <= 16


def test_only_known_files_of_trusted_folders_are_dropped(disk: Path, tmp_path: Path) -> None:
    """Nothing is removed through a link, from a folder that others could change, or that is no model's."""
    for name in ("model", "open", "linked"):
        with in_room(disk, name, 100) as tier:
            write(tier, range(8))
    (disk / "model" / "notes.txt").write_text("mine")
    (disk / "open").chmod(0o770)
    (disk / "linked").rename(tmp_path / "elsewhere")
    (disk / "linked").symlink_to(tmp_path / "elsewhere")
    (disk / "thesis").mkdir()
    (disk / "thesis" / SLOTS).write_bytes(b"no cache at all" * 10)
    with in_room(disk, "new", 17) as new:
        assert len(write(new, range(20, 30))) == 10
        assert slots_in(new.folder) == 8, "the rest is another's"
    assert (disk / "model" / "notes.txt").read_text() == "mine"
    assert (disk / "thesis" / SLOTS).read_bytes() == b"no cache at all" * 10
    assert not (disk / "model" / SLOTS).exists()
    for kept in (disk / "open", tmp_path / "elsewhere"):
        assert (kept / SLOTS).stat().st_size == 8 * SLOT_BYTES
        assert (kept / INDEX).exists()


def test_growing_is_one_process_at_a_time(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_room, "_WAIT_S", 0.05)
    with in_room(disk, "a", 20) as a:
        with Room(disk, None).locked():
            assert write(a, range(1)) == []
            assert slots_in(a.folder) == 0
        (reason,) = {*a.stats()["refused"]}
        assert reason.startswith("no room: ")
        assert (disk / GROWING).stat().st_mode & 0o777 == 0o600


def test_models_of_one_engine_folder_share_its_budget(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured before: every model took the whole budget again."""
    monkeypatch.setattr(disk_room, "_ROOM_REST_S", 0.0)
    budget = 10 * ENGINE_SLOT_BYTES
    models = [tiny_model("llama"), tiny_model("qwen2"), tiny_model("olmo2")]
    for round_number in range(2):
        for model in models:
            with make_engine(
                model=model, disk_cache_dir=tmp_path / "disk", disk_cache_bytes=budget
            ) as engine:
                for seed in range(4):
                    engine.warm(random_ids(64, seed=10 * round_number + seed))
                assert engine.core.parts.disk is not None
                assert engine.core.parts.disk.flush(20.0)
                assert engine.cache_stats()["disk"]["chunks"] > 0
                assert sum(path.stat().st_size for path in (tmp_path / "disk").rglob(SLOTS)) <= budget
    with pytest.raises(CacheFileError, match="is a file"):
        make_engine(disk_cache_dir=tmp_path / "disk" / GROWING)


def test_without_a_budget_each_model_has_its_own(make_engine: MakeEngine, tmp_path: Path) -> None:
    engines: list[Any] = [make_engine(name, disk_cache_dir=tmp_path / "disk") for name in ("llama", "qwen2")]
    for engine in engines:
        engine.warm(random_ids(64, seed=1))
        assert engine.core.parts.disk.flush(20.0)
        assert engine.cache_stats()["disk"]["max_chunks"] == 256
        assert engine.cache_stats()["disk"]["chunks"] == 4
