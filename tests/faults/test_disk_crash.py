"""A disk cache whose writers are killed: it opens again, nothing is wrong in it, and no slot is lost."""

from __future__ import annotations

import os
import random
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvboost.disk.tier import DiskTier
from tests.faults.disk_writer import SLOT_BYTES, Job, Writers, chunk_of, is_right, key_of

MAX_CHUNKS = 6
NUMBERS = 20  # chunks that writers choose from; those above are only written by the test itself


@pytest.fixture(scope="module")
def writers() -> Iterator[Writers]:
    with Writers() as started:
        yield started


def open_tier(folder: Path) -> DiskTier:
    return DiskTier(folder, max_chunks=MAX_CHUNKS, slot_bytes=SLOT_BYTES)


def index_state(folder: Path) -> tuple[list[int], list[int]]:
    """The slots of entries and of claims, as the database itself says."""
    connection = sqlite3.connect(folder / "index.sqlite")
    try:
        entries = [row[0] for row in connection.execute("SELECT slot FROM entries ORDER BY slot")]
        claims = [row[0] for row in connection.execute("SELECT slot FROM claims ORDER BY slot")]
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return entries, claims
    finally:
        connection.close()


def check_contents(tier: DiskTier) -> int:
    """Everything that is listed verifies; everything that can be read is right. How many could be read."""
    report = tier.check()
    assert report.is_good, (report.corrupt, report.problems)
    assert report.good == len(tier)
    hits = 0
    for number in range(NUMBERS):
        listed = key_of(number) in tier
        found = tier.read(key_of(number))
        assert (found is not None) == listed, f"chunk {number} is listed: {listed}"
        assert found is None or is_right(found, number), f"chunk {number} is wrong"
        hits += listed
    assert hits == report.good
    assert "corrupt" not in tier.stats()["misses"]
    return hits


def check_after_a_kill(folder: Path, number: int) -> int:
    """Open what a dead writer left, and use it; `number` is a chunk that no writer knows."""
    with open_tier(folder) as tier:
        hits = check_contents(tier)
        assert tier.write(chunk_of(number)), tier.stats()
        back = tier.read(key_of(number))
        assert back is not None
        assert is_right(back, number)
        report = tier.check()
        assert report.is_good
        assert report.writing == 0, "the dead writer's claims are taken back by the next claim"
        assert report.free + report.good == MAX_CHUNKS
        tier.remove([key_of(number)])
    entries, claims = index_state(folder)
    assert claims == []
    assert len(set(entries)) == len(entries)
    assert set(entries) <= set(range(MAX_CHUNKS))
    return hits


def check_that_all_slots_can_be_used(folder: Path) -> None:
    with open_tier(folder) as tier:
        numbers = range(500, 500 + MAX_CHUNKS)
        assert all(tier.write(chunk_of(number)) for number in numbers)
        assert len(tier) == MAX_CHUNKS
        assert tier.check().free == 0
        for number in numbers:
            found = tier.read(key_of(number))
            assert found is not None
            assert is_right(found, number)
        tier.remove([key_of(number) for number in numbers])


def kill_writers(writers: Writers, folder: Path, kills: int, seed: int) -> int:
    """Let a writer run for a random moment, kill it, look at what it left; how many chunks were found."""
    draw = random.Random(seed)
    report = folder.parent / "report.txt"
    hits = 0
    for kill in range(kills):
        pid = writers.start(Job(str(folder), MAX_CHUNKS, NUMBERS, seed + kill, 60.0, str(report)))
        time.sleep(draw.choice((0.03, 0.1, 0.3)) * draw.random())
        status = writers.kill(pid)
        assert status == -9, report.read_text() if report.exists() else status
        hits += check_after_a_kill(folder, NUMBERS + kill)
    check_that_all_slots_can_be_used(folder)
    return hits


def test_sixty_kills_of_a_writer(writers: Writers, tmp_path: Path) -> None:
    hits = kill_writers(writers, tmp_path / "cache", 60, seed=1)
    assert hits > 60, "the writers stored something"


@pytest.mark.soak
@pytest.mark.timeout(1_800)
def test_a_thousand_kills_of_a_writer(writers: Writers, tmp_path: Path) -> None:
    assert kill_writers(writers, tmp_path / "cache", 1_000, seed=1_000) > 1_000


def test_dead_owners_leave_no_files_behind(writers: Writers, tmp_path: Path) -> None:
    """A process that is killed with nothing claimed leaves its owner file; the next one clears it away."""
    folder = tmp_path / "cache"
    report = folder.parent / "report.txt"
    for seed in range(8):
        pid = writers.start(Job(str(folder), MAX_CHUNKS, NUMBERS, seed, 60.0, str(report)))
        time.sleep(0.1)
        assert writers.kill(pid) == -9
    with open_tier(folder) as tier:
        assert tier.write(chunk_of(0))
        assert len(os.listdir(folder / "owners")) == 1
    assert os.listdir(folder / "owners") == []


def test_a_claim_of_a_live_neighbour_is_left_alone_and_one_of_a_dead_neighbour_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with open_tier(folder) as tier:
        other = open_tier(folder)
        claimed, _ = other._index.claim(["a", "b"])
        assert all(tier.write(chunk_of(number)) for number in range(MAX_CHUNKS))
        assert not set(claimed.values()) & {entry.slot for entry in tier.entries()}
        assert len(tier) == MAX_CHUNKS - 2
        assert tier.check().writing == 2
        other.close()  # its claims are nobody's now
        assert tier.write(chunk_of(100))
        assert tier.check().writing == 0
        assert all(tier.write(chunk_of(number)) for number in range(200, 200 + MAX_CHUNKS))
        assert len(tier) == MAX_CHUNKS


def share_a_folder(writers: Writers, folder: Path, seconds: float, kill_each: float) -> None:
    """Four processes use one small folder; now and then one is killed and replaced."""
    reports = [folder.parent / f"report{place}.txt" for place in range(4)]
    until = time.monotonic() + seconds
    draw = random.Random(7)

    def start(place: int, seed: int) -> int:
        left = max(0.5, until - time.monotonic())
        return writers.start(Job(str(folder), MAX_CHUNKS, NUMBERS, seed, left, str(reports[place])))

    running = [start(place, place) for place in range(4)]
    kills = 0
    while time.monotonic() < until - kill_each / 2:
        time.sleep(kill_each * (0.5 + draw.random()))
        place = draw.randrange(4)
        status = writers.kill(running[place])
        assert status in (-9, 0), reports[place].read_text() if reports[place].exists() else status
        kills += 1
        running[place] = start(place, 100 + kills)
    statuses = [writers.wait(pid) for pid in running]
    told = "".join(path.read_text() for path in reports if path.exists())
    assert (statuses, told) == ([0] * 4, ""), told
    assert kills >= 3
    check_after_a_kill(folder, NUMBERS)
    check_that_all_slots_can_be_used(folder)


def test_four_processes_share_a_small_folder(writers: Writers, tmp_path: Path) -> None:
    share_a_folder(writers, tmp_path / "cache", 6.0, 1.0)


@pytest.mark.soak
def test_four_processes_share_a_small_folder_for_a_minute(writers: Writers, tmp_path: Path) -> None:
    share_a_folder(writers, tmp_path / "cache", 60.0, 5.0)
