"""Disk cache folders that somebody else prepared: refused with what to do, and left untouched."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvboost.cli.main import main
from kvboost.disk.folder import DESCRIPTION, OPENING, OWNERS
from kvboost.disk.room import GROWING
from kvboost.disk.tier import INDEX, SLOTS, DiskTier
from kvboost.errors import CacheFileError
from tests.faults.disk_writer import SLOT_BYTES, chunk_of, is_right, key_of
from tests.fixture_types import MakeEngine
from tests.tiny_models import random_ids

STRANGER = 12_345
MAX_CHUNKS = 4
DEAD_OWNER = f"{OWNERS}/{'a' * 32}"
FILES = (DESCRIPTION, INDEX, f"{INDEX}-wal", f"{INDEX}-shm", f"{INDEX}-journal", SLOTS, OPENING, DEAD_OWNER)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
State = dict[str, tuple[Any, ...]]


def open_tier(folder: Path) -> DiskTier:
    return DiskTier(folder, max_chunks=MAX_CHUNKS, slot_bytes=SLOT_BYTES)


def state_of(*roots: Path) -> State:
    """All that a process could have changed: names, kinds, owners, modes, times and contents."""
    found: State = {}
    for root in roots:
        for path in [root, *sorted(root.rglob("*"))]:
            one = path.lstat()
            is_file = stat.S_ISREG(one.st_mode)
            content = path.read_bytes() if is_file else os.readlink(path) if path.is_symlink() else None
            found[str(path)] = (one.st_mode, one.st_uid, one.st_ino, one.st_nlink, one.st_mtime_ns, content)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good folder with a chunk in it, a log beside its index, and the file of an owner that died."""
    made = tmp_path / "disk" / "tier"
    with open_tier(made) as tier:
        assert tier.write(chunk_of(0))
    for name in (f"{INDEX}-wal", f"{INDEX}-shm", f"{INDEX}-journal", DEAD_OWNER):
        (made / name).touch(mode=0o600)
    return made


def check_refused(folder: Path, *outside: Path, says: str) -> None:
    """Every way in refuses it in one line, and neither the folder nor anything outside is touched."""
    before = state_of(folder.parent, *outside)
    for way_in in (open_tier, DiskTier.existing):
        with pytest.raises(CacheFileError, match=says) as raised:
            way_in(folder)
        assert "\n" not in str(raised.value)
        assert any(word in str(raised.value) for word in ("use a", "remove it", "remove one")), raised.value
    for command in (
        ("disk", "check"),
        ("disk", "check", "--repair"),
        ("disk", "clear", "--yes"),
        ("stats", "--disk"),
    ):
        outcome = CliRunner().invoke(main, [*command, str(folder)])
        assert outcome.exit_code == 1, outcome.output
        assert outcome.stderr.count("\n") == 1
    assert state_of(folder.parent, *outside) == before


def test_the_specimen_itself_is_good(folder: Path) -> None:
    """So that what is refused below is refused for what was done to it."""
    with open_tier(folder) as tier:
        found = tier.read(key_of(0))
        assert found is not None
        assert is_right(found, 0)


# --- folders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o720, 0o770, 0o702, 0o777, 0o1777], ids=oct)
@pytest.mark.parametrize("name", [".", OWNERS])
def test_a_folder_that_others_may_write_to(name: str, mode: int, folder: Path) -> None:
    (folder / name).chmod(mode)
    check_refused(folder, says=f"others may write to .* {mode:04o}.*chmod go-w")


@as_root
@pytest.mark.parametrize("name", [".", OWNERS])
def test_a_folder_of_another_user(name: str, folder: Path) -> None:
    os.chown(folder / name, STRANGER, -1)
    check_refused(folder, says=f"belongs to user {STRANGER}.*use a folder of your own")


@as_root
def test_a_parent_of_another_user(folder: Path) -> None:
    os.chown(folder.parent, STRANGER, -1)
    check_refused(folder, says=f"belongs to user {STRANGER}")


def test_a_parent_in_which_everybody_may_exchange_things(folder: Path) -> None:
    folder.parent.chmod(0o777)
    check_refused(folder, says="everybody may exchange what is in .*chmod o-w")
    folder.parent.chmod(0o1777)  # sticky: only the owner may
    open_tier(folder).close()


def test_a_parent_of_a_group_is_allowed(folder: Path) -> None:
    """Project folders are like that; what a member puts in the folder's place belongs to that member."""
    folder.parent.chmod(0o770)
    open_tier(folder).close()


def test_folders_are_made_and_may_be_read_by_others(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o755)
    open_tier(tmp_path / "disk").close()
    open_tier(tmp_path / "a" / "b" / ".." / "c").close()
    assert (tmp_path / "a" / "c" / SLOTS).exists()


def test_a_link_that_the_user_names_is_followed_once(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "there").symlink_to("disk")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    with open_tier(tmp_path / "link" / "tier") as tier:
        assert tier.folder == folder
    for name, target in (("round", "about"), ("about", "round")):
        (tmp_path / name).symlink_to(target)
    with pytest.raises(CacheFileError, match="circle"):
        open_tier(tmp_path / "round" / "tier")


@as_root
def test_a_link_of_another_user_is_not_followed(folder: Path, tmp_path: Path) -> None:
    """In a folder like /tmp anybody may put a link that leads to files of this user."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    link = tmp_path / "shared" / "kv"
    link.symlink_to(folder.parent)
    os.chown(link, STRANGER, -1, follow_symlinks=False)
    before = state_of(folder.parent)
    with pytest.raises(CacheFileError, match=f"belongs to user {STRANGER}"):
        open_tier(link / "tier")
    assert state_of(folder.parent) == before


# --- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_a_link_in_place_of_a_file(name: str, folder: Path, tmp_path: Path) -> None:
    """Measured before: what a prepared folder linked to was written over."""
    victims = tmp_path / "victims"
    victims.mkdir()
    (victims / "thesis").write_bytes(b"ten years of work " * 3_000)
    (victims / "thesis").chmod(0o600)
    (folder / name).unlink()
    (folder / name).symlink_to(victims / "thesis")
    check_refused(folder, victims, says="is a link")
    (folder / name).unlink()
    (folder / name).symlink_to(victims / "nothing")  # and nothing is made through one
    check_refused(folder, victims, says="is a link")


@pytest.mark.parametrize("name", FILES)
def test_a_hard_link_in_place_of_a_file(name: str, folder: Path, tmp_path: Path) -> None:
    victims = tmp_path / "victims"
    victims.mkdir()
    (victims / "thesis").write_bytes(b"ten years of work " * 3_000)
    (victims / "thesis").chmod(0o600)
    (folder / name).unlink()
    os.link(victims / "thesis", folder / name)
    check_refused(folder, victims, says="hard link")


@pytest.mark.parametrize("name", FILES)
def test_a_fifo_in_place_of_a_file_hangs_nothing(name: str, folder: Path) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name, 0o600)
    check_refused(folder, says="no regular file")


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_others_may_write_to(name: str, folder: Path) -> None:
    (folder / name).chmod(0o620)
    check_refused(folder, says="others may write to .*chmod go-w")


@as_root
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_user(name: str, folder: Path) -> None:
    os.chown(folder / name, STRANGER, -1)
    check_refused(folder, says=f"belongs to user {STRANGER}")


def test_what_was_planted_while_it_was_open_is_not_opened(folder: Path, tmp_path: Path) -> None:
    """A running tier opens its files again where they were replaced; they are checked again then."""
    (tmp_path / "thesis").write_bytes(b"ten years of work")
    with open_tier(folder) as tier:
        (folder / SLOTS).unlink()
        (folder / SLOTS).symlink_to(tmp_path / "thesis")
        assert not tier.refresh()
        assert not tier.write(chunk_of(1))
        assert tier.read(key_of(1)) is None
    assert (tmp_path / "thesis").read_bytes() == b"ten years of work"


# --- through the engine ----------------------------------------------------------------------------


def test_a_refused_index_is_not_connected_to_by_name(folder: Path, tmp_path: Path) -> None:
    """Neither through a link nor in a folder that others may write to, nor after closing."""
    outside = tmp_path / "diary.sqlite"
    with contextlib.closing(sqlite3.connect(outside)) as diary:
        diary.execute("CREATE TABLE diary (page)")
    before = outside.read_bytes()
    with DiskTier(folder, max_chunks=MAX_CHUNKS, slot_bytes=SLOT_BYTES, grows=True) as tier:
        for name in (INDEX, f"{INDEX}-wal", f"{INDEX}-shm"):
            (folder / name).unlink()
        (folder / INDEX).symlink_to(outside)
        assert not tier.refresh()
        use_all(tier)
        (folder / INDEX).unlink()
        folder.chmod(0o777)
        assert not tier.refresh()
        use_all(tier)
        assert not (folder / INDEX).exists()
        folder.chmod(0o700)
        assert tier.refresh(), "it is opened again, with a look at it"
        assert is_right(tier.read(key_of(0)), 0)  # type: ignore[arg-type]
    (folder / INDEX).unlink()
    use_all(tier)
    assert not (folder / INDEX).exists()
    assert outside.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["diary.sqlite", "disk"]


def use_all(tier: DiskTier) -> None:
    tier.touch([key_of(0)])
    tier.remove([key_of(1)])
    assert not tier.write(chunk_of(2))
    with pytest.raises(CacheFileError, match="could not be cleared"):
        tier.clear()


def tier_of(disk: Path) -> Path:
    (found,) = (path for path in disk.iterdir() if path.is_dir())
    return found


@as_root
@pytest.mark.parametrize("which", ["disk", "tier", "slots"])
def test_kv_that_another_user_planted_is_not_served(
    which: str, make_engine: MakeEngine, tmp_path: Path
) -> None:
    """Measured before: it was, and called exact."""
    disk = tmp_path / "disk"
    with make_engine(disk_cache_dir=disk) as engine:
        engine.warm(random_ids(64, seed=1))
    tier = tier_of(disk)
    os.chown({"disk": disk, "tier": tier, "slots": tier / SLOTS}[which], STRANGER, -1)
    before = state_of(disk)
    with pytest.raises(CacheFileError, match=f"belongs to user {STRANGER}"):
        make_engine(disk_cache_dir=disk)
    assert state_of(disk) == before


def test_a_disk_cache_dir_that_others_may_write_to(make_engine: MakeEngine, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk").chmod(0o775)
    with pytest.raises(CacheFileError, match="chmod go-w"):
        make_engine(disk_cache_dir=tmp_path / "disk")
    assert os.listdir(tmp_path / "disk") == []


def test_the_folder_of_a_model_must_be_no_link(make_engine: MakeEngine, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with make_engine(disk_cache_dir=disk) as engine:
        engine.warm(random_ids(64, seed=1))
    tier = tier_of(disk)
    tier.rename(tmp_path / "elsewhere")
    tier.symlink_to(tmp_path / "elsewhere")
    before = state_of(disk, tmp_path / "elsewhere")
    with pytest.raises(CacheFileError, match="is a link"):
        make_engine(disk_cache_dir=disk)
    for command in (("disk", "check"), ("disk", "clear", "--yes"), ("stats", "--disk")):
        assert CliRunner().invoke(main, [*command, str(disk)]).exit_code == 1
    assert state_of(disk, tmp_path / "elsewhere") == before


def test_a_disk_cache_dir_that_is_a_link_is_used(make_engine: MakeEngine, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "disk").symlink_to(tmp_path / "real")
    with make_engine(disk_cache_dir=tmp_path / "disk") as engine:
        engine.warm(random_ids(64, seed=1))
    with make_engine(disk_cache_dir=tmp_path / "disk") as engine:
        assert engine.generate([*random_ids(64, seed=1), 7], max_new_tokens=1).cached_tokens == 64


def test_a_link_in_place_of_the_lock_for_growing(make_engine: MakeEngine, tmp_path: Path) -> None:
    """It is no file of the model's: nothing can be saved, and what it leads to is left alone."""
    disk, victim = tmp_path / "disk", tmp_path / "thesis"
    disk.mkdir(mode=0o700)
    victim.write_bytes(b"ten years of work")
    (disk / GROWING).symlink_to(victim)
    with make_engine(disk_cache_dir=disk) as engine:
        engine.warm(random_ids(64, seed=1))
        assert engine.core.parts.disk is not None
        assert engine.core.parts.disk.flush(10.0)
        stats = engine.cache_stats()["disk"]
    assert (stats["chunks"], stats["allocated_bytes"]) == (0, 0)
    assert any("is a link" in reason for reason in stats["refused"])
    assert victim.read_bytes() == b"ten years of work"


# --- what was set aside ----------------------------------------------------------------------------


def test_a_leftover_that_cannot_be_removed_is_only_in_the_way(folder: Path) -> None:
    (folder / f"{INDEX}.damaged").mkdir()
    with open_tier(folder) as tier:
        tier.clear()
        assert len(tier) == 0
        assert tier.write(chunk_of(1))


@pytest.mark.parametrize("by_command", [False, True], ids=["call", "command"])
def test_clear_takes_the_damaged_index_along(
    by_command: bool, folder: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """It holds the tokens of all texts."""
    aside = folder / f"{INDEX}.damaged"
    (folder / INDEX).write_bytes(b"garbage" * 500)
    (folder / f"{DESCRIPTION}.{'b' * 32}").touch(mode=0o600)  # of a process that died while opening
    if by_command:
        outcome = CliRunner().invoke(main, ["disk", "clear", "--yes", str(folder)])
        assert (outcome.exit_code, outcome.stdout) == (0, "1 chunks forgotten\n")
    else:
        with open_tier(folder) as tier:
            assert aside.exists()
            tier.clear()
    assert len(recwarn) == 1
    assert not aside.exists()
    assert not list(folder.glob(f"{DESCRIPTION}.*"))
    with open_tier(folder) as tier:
        assert len(tier) == 0
        assert tier.write(chunk_of(1))
    shutil.rmtree(folder)
