"""Folders that a process may not write to: it serves what is in them, writes nothing, and says so.

Nothing is forbidden to root, so each program below drops to another user once it has imported everything.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvboost.disk.folder import DESCRIPTION
from kvboost.disk.tier import INDEX, SLOTS, DiskTier
from tests.faults.disk_writer import SLOT_BYTES, chunk_of
from tests.faults.test_foreign_folders import STRANGER, as_root, state_of

ROOT = Path(__file__).parents[2]
pytestmark = as_root

PRELUDE = f"""
import logging, os, sqlite3, sys, time
from pathlib import Path
from kvboost.disk.tier import DiskTier
from kvboost.errors import CacheFileError
from tests.faults.disk_writer import SLOT_BYTES, chunk_of, is_right, key_of
folder = Path(sys.argv[1])
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")

def drop():
    os.setgroups([])
    os.setgid({STRANGER})
    os.setuid({STRANGER})
"""
TIER = """
drop()
with DiskTier(folder, max_chunks=4, slot_bytes=SLOT_BYTES) as tier:
    assert tier.is_read_only
    assert len(tier) == 3
    for number in range(3):
        assert is_right(tier.read(key_of(number)), number)
    assert tier.write(chunk_of(0)) is True, "it is there"
    assert tier.write(chunk_of(7)) is False
    tier.touch([key_of(0)])
    tier.remove([key_of(0)])
    assert is_right(tier.read(key_of(0)), 0)
    tier.refresh()
    assert not tier.refresh(), "nothing is new"
    assert tier.stats()["read_only"] is True
    assert tier.stats()["refused"] == {"read-only folder": 1}, tier.stats()
    assert (tier.check().good, tier.check().is_good) == (3, True)
    for refused in (tier.clear, lambda: tier.check(repair=True)):
        try:
            refused()
        except CacheFileError as error:
            assert "cannot be changed" in str(error)
        else:
            raise AssertionError("it was changed")
with DiskTier.existing(folder) as tier:
    assert is_right(tier.read(key_of(1)), 1)
print("done")
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that other users can enter; pytest's own are closed to them."""
    made = Path(tempfile.mkdtemp(prefix="kvboost-read-only-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def folder(shared: Path) -> Path:
    """A cache with three chunks; what stands in its name must not end up in an SQLite URI as it is."""
    made = shared / "tier #1 100%?mode=rwc"
    with DiskTier(made, max_chunks=4, slot_bytes=SLOT_BYTES) as tier:
        assert all(tier.write(chunk_of(number)) for number in range(3))
    return made


def let_all_read(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)


def run(program: str, folder: Path, *within: str) -> str:
    """Run it in a process that may drop to another user; returns what was logged."""
    done = subprocess.run(
        [*within, sys.executable, "-c", PRELUDE + program, str(folder)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    return done.stderr


def test_a_folder_of_root_that_others_may_read(folder: Path) -> None:
    let_all_read(folder)
    before = state_of(folder)
    logged = run(TIER, folder).splitlines()
    assert state_of(folder) == before
    assert len(logged) == 2, "one line for each opening"
    assert all(line.startswith("INFO ") and "cannot be written to" in line for line in logged)


def test_a_folder_that_its_owner_closed_for_writing(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, STRANGER, STRANGER)
    folder.chmod(0o500)
    before = state_of(folder)
    run(TIER, folder)
    assert state_of(folder) == before


def test_a_file_system_that_is_mounted_for_reading_only(folder: Path) -> None:
    """For root too. The mount is seen by the program alone."""
    mount = 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1"'
    if (
        not shutil.which("unshare")
        or subprocess.run(
            ["unshare", "-m", "sh", "-c", mount, "-", str(folder)], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("mounting is not allowed here")
    before = state_of(folder)
    run(
        TIER.replace("drop()", ""),
        folder,
        "unshare",
        "-m",
        "sh",
        "-c",
        f'{mount} && shift && exec "$@"',
        "-",
        str(folder),
    )
    assert state_of(folder) == before


def test_a_log_that_a_killed_process_left(folder: Path) -> None:
    """SQLite cannot replay it there; what is in the index itself is served, and nothing wrong."""
    tier = DiskTier(folder, max_chunks=4, slot_bytes=SLOT_BYTES)
    assert tier.write(chunk_of(3))
    copy = folder.with_name("copy")
    subprocess.run(["cp", "-r", str(folder), str(copy)], check=True)
    tier.close()
    shutil.rmtree(copy / "owners")
    (copy / f"{INDEX}-shm").unlink()
    let_all_read(copy)
    before = state_of(copy)
    program = """
drop()
with DiskTier(folder, max_chunks=4, slot_bytes=SLOT_BYTES) as tier:
    found = [tier.read(key_of(number)) for number in range(4)]
    assert all(chunk is None or is_right(chunk, number) for number, chunk in enumerate(found))
    assert sum(chunk is not None for chunk in found) >= 3
print("done")
"""
    run(program, copy)
    assert state_of(copy) == before


def test_chunks_that_another_process_writes_meanwhile_are_found(folder: Path) -> None:
    """With a writer beside it, the reader follows what it does: chunks come, go and move."""
    program = """
to_reader, to_writer = os.pipe(), os.pipe()
if (child := os.fork()) == 0:
    os.read(to_reader[0], 1)
    drop()
    with DiskTier(folder, max_chunks=4, slot_bytes=SLOT_BYTES) as tier:
        assert len(tier) == 3
        os.write(to_writer[1], b"x")
        os.set_blocking(to_reader[0], False)
        is_over = False
        while not is_over:
            try:
                is_over = bool(os.read(to_reader[0], 1))
            except BlockingIOError:
                pass
            for number in range(30):
                chunk = tier.read(key_of(number))
                assert chunk is None or is_right(chunk, number)
        found = [number for number in range(30) if tier.read(key_of(number)) is not None]
        assert found == [26, 27, 28, 29], found
    os._exit(0)
with DiskTier(folder, max_chunks=4, slot_bytes=SLOT_BYTES) as tier:
    for path in folder.iterdir():
        path.chmod(0o755 if path.is_dir() else 0o644)
    for path in (folder / "owners").iterdir():
        path.chmod(0o644)
    os.write(to_reader[1], b"x")
    os.read(to_writer[0], 1)
    for number in range(3, 30):
        assert tier.write(chunk_of(number))
    os.write(to_reader[1], b"x")
    assert os.waitpid(child, 0)[1] == 0
print("done")
"""
    let_all_read(folder)
    run(program, folder)


def test_a_writer_that_starts_later_is_followed(folder: Path) -> None:
    """The reader opened the index as it lay, without a log."""
    program = """
to_reader, to_writer = os.pipe(), os.pipe()
if (child := os.fork()) == 0:
    drop()
    with DiskTier(folder, max_chunks=4, slot_bytes=SLOT_BYTES) as tier:
        assert len(tier) == 3
        os.write(to_writer[1], b"x")
        os.read(to_reader[0], 1)
        assert tier.refresh()
        found = [number for number in range(20) if tier.read(key_of(number)) is not None]
        assert found == [16, 17, 18, 19], found
        assert not tier.refresh(), "nothing is new"
    os._exit(0)
os.read(to_writer[0], 1)
with DiskTier(folder, max_chunks=4, slot_bytes=SLOT_BYTES) as tier:
    for number in range(10, 20):
        assert tier.write(chunk_of(number))
    os.write(to_reader[1], b"x")
    assert os.waitpid(child, 0)[1] == 0
print("done")
"""
    let_all_read(folder)
    run(program, folder)


@pytest.mark.parametrize("name", [INDEX, SLOTS, DESCRIPTION])
def test_what_is_missing_or_damaged_is_said_in_a_line(name: str, folder: Path) -> None:
    program = """
drop()
try:
    DiskTier(folder, max_chunks=4, slot_bytes=SLOT_BYTES)
except CacheFileError as error:
    assert str(folder) in str(error) and "\\n" not in str(error), error
else:
    raise AssertionError("it was opened")
print("done")
"""
    if name != SLOTS:
        (folder / name).write_bytes(b"garbage" * 500)
        let_all_read(folder)
        run(program, folder)
    (folder / name).unlink()
    let_all_read(folder)
    before = state_of(folder)
    run(program, folder)
    assert state_of(folder) == before


@pytest.mark.timed
def test_an_engine_serves_from_it_and_saves_nothing(shared: Path) -> None:
    program = """
from kvboost import KVBoost
from tests.tiny_models import random_ids, tiny_model, tiny_tokenizer
model = tiny_model("llama")
def engine(**options):
    return KVBoost(model, tiny_tokenizer(), chunk_size=16, disk_cache_dir=folder, **options)
texts = [random_ids(64, seed=seed) for seed in range(6)]
with engine() as one:
    one.warm(texts[0])
    expected = [one.generate([*text, 7], max_new_tokens=4, mode="baseline").token_ids for text in texts]
os.system(f"chmod -R a+rX {str(folder)!r}")
before = sorted((str(path), path.lstat().st_mtime_ns) for path in folder.rglob("*"))
drop()
with engine(max_chunks=6) as two:
    for _ in range(2):
        for text, wanted in zip(texts, expected):
            result = two.generate([*text, 7], max_new_tokens=4, mode="prefix_cache")
            assert result.token_ids == wanted
            two.core.parts.workspace.drop()
    assert two.generate([*texts[0], 7], max_new_tokens=1, mode="prefix_cache").cached_tokens == 64
    stats = two.cache_stats()["disk"]
    assert (stats["read_only"], stats["chunks"], stats["unsaved_chunks"]) == (True, 4, 0), stats
    assert stats["refused"] == {}, "it does not even try"
    started = time.monotonic()
    assert two.core.parts.disk.flush()
    try:
        two.clear()
    except CacheFileError as error:
        assert "nothing was cleared" in str(error)
    else:
        raise AssertionError("it was cleared")
    two.cache_manager.check_integrity()
    started = time.monotonic()
assert time.monotonic() - started < 2
assert sorted((str(path), path.lstat().st_mtime_ns) for path in folder.rglob("*")) == before
try:
    KVBoost(tiny_model("qwen2"), tiny_tokenizer(), chunk_size=16, disk_cache_dir=folder)
except CacheFileError as error:
    assert "cannot be made" in str(error), error
else:
    raise AssertionError("it has no folder there")
print("done")
"""
    logged = run(program, shared / "disk")
    assert logged.count("cannot be written to") == 1
