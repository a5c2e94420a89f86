"""A disk that fails, lies or was damaged: a read is the right tensor or a miss, and later use recovers."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import random
import shutil
import sqlite3
import struct
import subprocess
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvboost.disk.folder import DESCRIPTION, OPENING
from kvboost.disk.index import DiskIndex
from kvboost.disk.serde import to_record
from kvboost.disk.tier import INDEX, SLOTS, DiskTier
from kvboost.errors import CacheFileError
from tests.equivalence.proofs import write_result
from tests.faults.disk_writer import SLOT_BYTES, chunk_of, is_right, key_of

MAX_CHUNKS = 4
NUMBERS = range(12)
FILES = (SLOTS, INDEX, f"{INDEX}-wal")


def open_tier(folder: Path, max_chunks: int = MAX_CHUNKS) -> DiskTier:
    return DiskTier(folder, max_chunks=max_chunks, slot_bytes=SLOT_BYTES)


def read_right(tier: DiskTier, number: int) -> bool:
    """Whether a chunk could be read; what is read must be right."""
    found = tier.read(key_of(number))
    assert found is None or is_right(found, number), f"chunk {number} is wrong"
    return found is not None


def check_recovered(folder: Path) -> None:
    """A fresh tier takes as many chunks as it has slots, and gives them back."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # an index may have to be made anew
        tier = open_tier(folder)
    with tier:
        for number in NUMBERS:
            read_right(tier, number)
        numbers = range(100, 100 + MAX_CHUNKS)
        written = [tier.write(chunk_of(number)) for number in numbers]
        assert all(written), tier.stats()
        assert all(read_right(tier, number) for number in numbers), tier.stats()
        report = tier.check()
        assert report.is_good
        assert (report.good, report.writing, report.free) == (MAX_CHUNKS, 0, 0)


# --- every Nth call fails --------------------------------------------------------------------------


class Faults:
    """Counts calls; the ones from number `at` on, `length` of them, go wrong."""

    def __init__(self, at: int = -1, length: int = 1) -> None:
        self.at = at
        self.length = length
        self.calls = 0
        self.is_over = False

    def strikes(self) -> bool:
        if self.is_over:
            return False
        number, self.calls = self.calls, self.calls + 1
        return 0 <= self.at <= number < self.at + self.length


FOREVER = 10**9


def _opened(folder: Path) -> DiskTier | None:
    """A tier, or None where opening is refused in one clear line. Nothing else may come out."""
    tier, refusal = _tried(folder)
    assert tier is not None or is_clear(refusal, folder), refusal
    return tier


def _tried(folder: Path) -> tuple[DiskTier | None, str]:
    try:
        return open_tier(folder), ""
    except CacheFileError as error:
        return None, str(error)


def is_clear(refusal: str, folder: Path) -> bool:
    """One line that names the folder."""
    return "\n" not in refusal and str(folder) in refusal


def script(folder: Path, faults: Faults) -> None:
    """Writes, reads, evictions, a neighbour, a reopening, and a damaged index."""
    if (tier := _opened(folder)) is not None:
        with tier:
            tier.write(chunk_of(0))
            tier.write_records([to_record(chunk_of(number)) for number in (1, 2)])
            for number in range(4):
                read_right(tier, number)
            tier.touch([key_of(0)])
            if (other := _opened(folder)) is not None:
                with other:
                    other.write_records([to_record(chunk_of(number)) for number in (3, 4)])
                    for number in range(5):
                        read_right(other, number)
            for number in range(5):
                read_right(tier, number)
            tier.remove([key_of(3)])
            tier.write(chunk_of(5))
            tier.check(repair=True)
            _check_same_tier_recovers(tier, faults)
    if (tier := _opened(folder)) is not None:
        with tier:
            for number in range(7):
                read_right(tier, number)
            tier.write(chunk_of(6))
    for name in (f"{INDEX}-wal", f"{INDEX}-shm"):
        (folder / name).unlink(missing_ok=True)
    if (folder / INDEX).exists():
        (folder / INDEX).write_bytes(b"no database" * 1_000)
    if (tier := _opened(folder)) is not None:
        with tier:
            for number in range(8):
                read_right(tier, number)
            tier.write(chunk_of(7))


def _check_same_tier_recovers(tier: DiskTier, faults: Faults) -> None:
    """Once a fault is over, the tier that met it works again, and has lost no slot."""
    calls_before, faults.is_over = faults.is_over, True
    numbers = range(50, 50 + MAX_CHUNKS)
    written = [tier.write(chunk_of(number)) for number in numbers]
    assert all(written), tier.stats()
    assert all(read_right(tier, number) for number in numbers), tier.stats()
    assert tier.check().writing == 0, "a slot stays claimed"
    faults.is_over = calls_before


def for_all_n(
    tmp_path: Path, install: Callable[[Faults], contextlib.AbstractContextManager[None]], length: int
) -> int:
    """Run the script once for each N; the number of calls it makes without any fault."""
    counted = Faults()
    with install(counted), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        script(tmp_path / "clean", counted)
    failures = []
    for at in range(counted.calls):
        folder = tmp_path / f"at{at}"
        faults = Faults(at, length)
        try:
            with install(faults), warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # an index may have to be made anew
                script(folder, faults)
            check_recovered(folder)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            failures.append(
                f"call {at}: {type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
            )
        shutil.rmtree(folder)
    assert not failures, f"{len(failures)} of {counted.calls}:\n" + "\n".join(failures[:40])
    return counted.calls


def _shortened(parts: Sequence[Any], size: int) -> list[memoryview]:
    """The first `size` bytes of buffers."""
    kept = []
    for part in parts:
        view = memoryview(part)[:size]
        kept.append(view)
        size -= len(view)
        if size == 0:
            break
    return kept


def _bad_call(name: str, how: str, faults: Faults, folder: Path) -> Callable[..., Any]:
    real = getattr(os, name)

    def call(*args: Any, **options: Any) -> Any:
        if name in ("open", "replace") and not str(args[0]).startswith(str(folder)):
            return real(*args, **options)
        if not faults.strikes():
            return real(*args, **options)
        if how in ("EIO", "ENOSPC"):
            number = getattr(errno, how)
            raise OSError(number, os.strerror(number))
        if how == "nothing":
            return 0
        fd, parts, *rest = args
        total = sum(len(memoryview(part)) for part in parts)
        return real(fd, _shortened(parts, max(1, total // 3)), *rest)

    return call


_OS_CALLS = [
    ("pwritev", "EIO"),
    ("pwritev", "ENOSPC"),
    ("pwritev", "short"),
    ("pwritev", "nothing"),
    ("preadv", "EIO"),
    ("preadv", "short"),
    ("preadv", "nothing"),
    ("fdatasync", "EIO"),
    ("fdatasync", "ENOSPC"),
    ("open", "EIO"),
    ("open", "ENOSPC"),
    ("replace", "EIO"),
    ("replace", "ENOSPC"),
    ("posix_fallocate", "EIO"),
    ("posix_fallocate", "ENOSPC"),
]


@pytest.mark.parametrize("length", [1, FOREVER], ids=["once", "from_then_on"])
@pytest.mark.parametrize(("name", "how"), _OS_CALLS, ids=lambda value: str(value))
def test_every_call_of_the_system_failing_in_turn(
    name: str, how: str, length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def install(faults: Faults) -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(os, name, _bad_call(name, how, faults, tmp_path))
            yield

    least = {"replace": 1, "posix_fallocate": 3}.get(name, 5)
    assert for_all_n(tmp_path, install, length) >= least


_SQLITE_ERRORS = {
    "io": (sqlite3.OperationalError, "disk I/O error"),
    "full": (sqlite3.OperationalError, "database or disk is full"),
    "locked": (sqlite3.OperationalError, "database is locked"),
    "malformed": (sqlite3.DatabaseError, "database disk image is malformed"),
}


@pytest.mark.parametrize(
    ("kind", "length", "after"),
    [
        ("io", 1, False),
        ("io", 1, True),
        ("io", 2, False),
        ("io", FOREVER, False),
        ("full", 1, False),
        ("locked", 1, False),
        ("malformed", 1, False),
        ("malformed", FOREVER, False),
    ],
    ids=[
        "io",
        "io_after_it_ran",
        "io_twice",
        "io_from_then_on",
        "full",
        "locked",
        "malformed",
        "always_malformed",
    ],
)
def test_every_statement_of_the_index_failing_in_turn(
    kind: str, length: int, after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = DiskIndex._execute
    error, message = _SQLITE_ERRORS[kind]

    @contextlib.contextmanager
    def install(faults: Faults) -> Iterator[None]:
        def execute(index: DiskIndex, statement: str, values: Sequence[object] = ()) -> sqlite3.Cursor:
            bad = faults.strikes()
            if bad and not after:
                raise error(message)
            cursor = real(index, statement, values)
            if bad:
                cursor.fetchall()
                raise error(message)
            return cursor

        with monkeypatch.context() as patch:
            patch.setattr(DiskIndex, "_execute", execute)
            patch.setattr("kvboost.disk.index._BUSY_SECONDS", 0.05)
            yield

    assert for_all_n(tmp_path, install, length) > 100


# --- an index that is made anew ---------------------------------------------------------------------


@pytest.mark.parametrize("was", ["damaged", "gone"])
@pytest.mark.parametrize("how", ["fails", "killed"])
def test_an_index_whose_making_was_cut_off_is_made_again(
    how: str, was: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_tier(tmp_path / "tier") as tier:
        assert all(tier.write(chunk_of(number)) for number in range(MAX_CHUNKS))
    if was == "gone":
        (tmp_path / "tier" / INDEX).unlink()
    else:
        (tmp_path / "tier" / INDEX).write_bytes(b"garbage" * 1_000)

    folder = tmp_path / ("tier" if how == "fails" else "as a killed process leaves it")

    def stop(_slots: object) -> list[object]:
        if how == "killed":
            subprocess.run(["cp", "-r", str(tmp_path / "tier"), str(folder)], check=True)
            shutil.rmtree(folder / "owners")
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        patch.setattr("kvboost.disk.opening.rows_in", stop)
        assert _opened(tmp_path / "tier") is None
    with open_tier(folder) as tier:
        assert all(read_right(tier, number) for number in range(MAX_CHUNKS))
        tier.remove([key_of(number) for number in range(MAX_CHUNKS)])
    with open_tier(folder) as tier:
        assert len(tier) == 0, "what was removed stays so"


def test_an_index_of_before_that_has_rows_is_complete(tmp_path: Path) -> None:
    """It has no mark; what was removed from it must not come back."""
    with open_tier(tmp_path / "tier") as tier:
        assert all(tier.write(chunk_of(number)) for number in range(3))
        tier.remove([key_of(1)])
        with tier._index.transaction():
            tier._index._execute("DELETE FROM meta WHERE name = 'complete'")
    with open_tier(tmp_path / "tier") as tier:
        assert [read_right(tier, number) for number in range(3)] == [True, False, True]


@pytest.mark.parametrize(
    "message",
    [
        "database or disk is full",
        "unable to open database file",
        "attempt to write a readonly database",
        "disk I/O error",
    ],
)
def test_an_index_that_cannot_be_used_now_is_not_taken_for_a_damaged_one(
    message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tier"
    with open_tier(folder) as tier:
        assert all(tier.write(chunk_of(number)) for number in range(MAX_CHUNKS))
    before = (folder / INDEX).read_bytes()
    log = folder / f"{INDEX}-wal"
    log.touch(mode=0o600)

    def fail(_index: DiskIndex) -> list[str]:
        raise sqlite3.OperationalError(message)

    with monkeypatch.context() as patch:
        patch.setattr(DiskIndex, "problems", fail)
        patch.setattr(DiskIndex, "close", lambda _index: None)  # it would remove the log
        with pytest.raises(CacheFileError, match=message):
            open_tier(folder)
        assert log.exists()
    assert (folder / INDEX).read_bytes()[:100] == before[:100]
    assert not (folder / f"{INDEX}.damaged").exists()
    with open_tier(folder) as tier:
        assert all(read_right(tier, number) for number in range(MAX_CHUNKS))


def test_a_folder_that_another_process_keeps_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvboost.disk.opening._WAIT_S", 0.1, raising=False)
    with open_tier(tmp_path / "tier"):
        pass
    with open(tmp_path / "tier" / OPENING) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(CacheFileError, match=f"holds the lock on .*{OPENING}"):
            open_tier(tmp_path / "tier")


# --- damage ----------------------------------------------------------------------------------------


class Specimen:
    """A folder as a process that was killed left it (with a log) or as one that closed it left it."""

    def __init__(self, folder: Path, *, closed: bool) -> None:
        self.folder = folder / "use"
        source = folder / "source"
        tier = open_tier(source)
        for number in range(MAX_CHUNKS + 2):
            assert tier.write(chunk_of(number))
        tier.touch([key_of(3)])
        self.numbers = [number for number in NUMBERS if key_of(number) in tier]
        assert len(self.numbers) == MAX_CHUNKS
        kept = folder / "kept"
        if closed:
            tier.close()
        # by another process: closing any handle of the database drops this process's locks on it
        subprocess.run(["cp", "-r", str(source), str(kept)], check=True)
        tier.close()
        shutil.rmtree(kept / "owners")
        (kept / f"{INDEX}-shm").unlink(missing_ok=True)
        self.files = {path.name: path.read_bytes() for path in kept.iterdir()}
        assert (f"{INDEX}-wal" in self.files) != closed

    def restore(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(mode=0o700)
        for name, data in self.files.items():
            (self.folder / name).write_bytes(data)

    def change(self, name: str, change: Callable[[bytearray], bytearray | None]) -> None:
        path = self.folder / name
        data = bytearray(path.read_bytes())
        changed = change(data)
        path.write_bytes(data if changed is None else changed)


@dataclass(frozen=True)
class Outcome:
    hits: int
    was_rebuilt: bool
    refused: str  # at the first opening; "" = it opened
    corrupt: int

    @property
    def name(self) -> str:
        if self.refused:
            return "refused, then rebuilt"
        if self.was_rebuilt:
            return f"index rebuilt, {self.hits} of {MAX_CHUNKS} right"
        return "all right" if self.hits == MAX_CHUNKS else f"{MAX_CHUNKS - self.hits} missed"


def look_at(specimen: Specimen) -> Outcome:
    """Open a damaged folder, read all, repair it, read all again; nothing may be wrong, nothing raise."""
    folder = specimen.folder
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        tier, refused = _tried(folder)
        if tier is None:
            assert is_clear(refused, folder), refused
            tier = open_tier(folder)  # refused once, and made anew
    assert all(str(warning.message).count("damaged") for warning in told)
    with tier:
        hits = sum(read_right(tier, number) for number in NUMBERS)
        corrupt = tier.stats()["misses"].get("corrupt", 0)
        tier.check(repair=True)
        report = tier.check()
        assert report.is_good, (report.corrupt, report.problems)
        assert sum(read_right(tier, number) for number in NUMBERS) == report.good == hits
        assert tier.write(chunk_of(11)), tier.stats()
        assert read_right(tier, 11)
        report = tier.check()
        assert report.free + report.good == MAX_CHUNKS
        assert report.writing == 0
    return Outcome(hits, bool(told), refused, corrupt)


@pytest.fixture(scope="module")
def closed_specimen(tmp_path_factory: pytest.TempPathFactory) -> Specimen:
    return Specimen(tmp_path_factory.mktemp("closed"), closed=True)


@pytest.fixture(scope="module")
def killed_specimen(tmp_path_factory: pytest.TempPathFactory) -> Specimen:
    return Specimen(tmp_path_factory.mktemp("killed"), closed=False)


@dataclass(frozen=True)
class Flip:
    file: str
    place: int
    bit_mask: int
    outcome: str


def flip_bytes(specimens: Sequence[Specimen], count: int, seed: int) -> list[Flip]:
    """Change one byte at a random place, again and again, each time in a fresh copy."""
    draw = random.Random(seed)
    flips = []
    for number in range(count):
        name = FILES[number % len(FILES)]
        specimen = draw.choice([one for one in specimens if name in one.files])
        size = len(specimen.files[name])
        place, mask = draw.randrange(size), draw.choice((draw.randrange(1, 256), 1 << draw.randrange(8)))
        if name == SLOTS and draw.random() < 0.5:  # half of them where something is written
            place = (
                place - place % SLOT_BYTES + draw.choice((draw.randrange(700), 4_096 + draw.randrange(8_192)))
            )
        flips.append(_one_flip(specimen, name, place, mask))
    return flips


def _one_flip(specimen: Specimen, name: str, place: int, mask: int) -> Flip:
    specimen.restore()

    def flip(data: bytearray) -> None:
        data[place] ^= mask

    specimen.change(name, flip)
    try:
        outcome = look_at(specimen)
    except Exception as error:
        raise AssertionError(f"byte {place} of {name} changed by {mask:#04x}: {error!r}") from error
    if name == SLOTS:
        assert outcome.hits >= MAX_CHUNKS - 1, "a byte of one slot costs one chunk at most"
        assert outcome.corrupt == MAX_CHUNKS - outcome.hits
        assert not outcome.was_rebuilt
    return Flip(name, place, mask, outcome.name)


def test_flipped_bytes(closed_specimen: Specimen, killed_specimen: Specimen) -> None:
    flips = flip_bytes([closed_specimen, killed_specimen], 600, seed=11)
    kinds = Counter((flip.file, flip.outcome) for flip in flips)
    assert kinds[SLOTS, "1 missed"] > 50
    assert kinds[SLOTS, "all right"] > 50, "bytes that are not used"


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_ten_thousand_flipped_bytes(closed_specimen: Specimen, killed_specimen: Specimen) -> None:
    flips = flip_bytes([closed_specimen, killed_specimen], 10_000, seed=12)
    outcomes = {
        name: dict(sorted(Counter(flip.outcome for flip in flips if flip.file == name).items()))
        for name in FILES
    }
    write_result(
        "proof-disk-flips",
        {"flips": len(flips), "outcomes": json.loads(json.dumps(outcomes))},  # any wrong tensor fails before
        [],
        model=None,
    )


def test_every_byte_of_the_settings_in_the_index(closed_specimen: Specimen) -> None:
    """Damage to version or slot size must not make the folder one that "was made with" other settings."""
    data = closed_specimen.files[INDEX]
    places = [
        place
        for name in (b"version", b"slot_bytes", b"num_slots", b"clock")
        for at in _finds(data, name)
        for place in range(at - 6, at + len(name) + 4)
    ]
    assert len(places) > 60
    for place in places:
        for mask in (0x01, 0x80):
            _one_flip(closed_specimen, INDEX, place, mask)


def test_every_byte_of_the_description_of_the_folder(closed_specimen: Specimen) -> None:
    """One damaged digit must not make the folder one of another slot size or version for good."""
    for place in range(len(closed_specimen.files[DESCRIPTION])):
        for mask in (0x01, 0x08, 0x80):
            assert _one_flip(closed_specimen, DESCRIPTION, place, mask).outcome == "all right"


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"null", b"\xff\xfe", b"garbage", b"[" * 100_000])
def test_a_description_of_the_folder_that_makes_no_sense(content: bytes, closed_specimen: Specimen) -> None:
    closed_specimen.restore()
    (closed_specimen.folder / DESCRIPTION).write_bytes(content)
    assert look_at(closed_specimen).hits == MAX_CHUNKS


def _finds(data: bytes, what: bytes) -> Iterator[int]:
    at = data.find(what)
    while at >= 0:
        yield at
        at = data.find(what, at + 1)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.5, 0.77, 0.9999])
def test_truncated_files(name: str, share: float, killed_specimen: Specimen) -> None:
    killed_specimen.restore()
    killed_specimen.change(name, lambda data: data[: int(len(data) * share)])
    outcome = look_at(killed_specimen)
    if name == SLOTS:
        assert outcome.hits == sum(
            slot * SLOT_BYTES + 12_288 <= share * MAX_CHUNKS * SLOT_BYTES for slot in range(4)
        )


@pytest.mark.parametrize("name", FILES)
def test_files_with_other_contents(name: str, killed_specimen: Specimen) -> None:
    size = len(killed_specimen.files[name])
    noise = random.Random(3).randbytes(size)
    for content in (noise, b"\0" * size, b"\xff" * size, noise[:100], b"SQLite format 3\0" + noise):
        killed_specimen.restore()
        killed_specimen.change(name, lambda _data, content=content: bytearray(content))
        look_at(killed_specimen)


@pytest.mark.parametrize(
    "names", [(SLOTS,), (INDEX,), (f"{INDEX}-wal",), (INDEX, f"{INDEX}-wal"), FILES], ids=str
)
def test_deleted_files(names: tuple[str, ...], killed_specimen: Specimen) -> None:
    killed_specimen.restore()
    for name in names:
        (killed_specimen.folder / name).unlink()
    look_at(killed_specimen)


def test_two_slots_swapped(closed_specimen: Specimen) -> None:
    closed_specimen.restore()

    def swap(data: bytearray) -> bytearray:
        slots = [bytes(data[at : at + SLOT_BYTES]) for at in range(0, len(data), SLOT_BYTES)]
        slots[1], slots[2] = slots[2], slots[1]
        return bytearray(b"".join(slots))

    closed_specimen.change(SLOTS, swap)
    outcome = look_at(closed_specimen)
    assert (outcome.hits, outcome.corrupt, outcome.was_rebuilt) == (2, 2, False)


@pytest.mark.parametrize("part", ["header", "payload", "fixed"])
def test_a_part_of_one_slot_over_another(part: str, closed_specimen: Specimen) -> None:
    first, last = {"header": (0, 4_096), "payload": (4_096, 12_288), "fixed": (0, 48)}[part]
    closed_specimen.restore()

    def copy(data: bytearray) -> None:
        data[SLOT_BYTES + first : SLOT_BYTES + last] = data[first:last]

    closed_specimen.change(SLOTS, copy)
    outcome = look_at(closed_specimen)
    assert (outcome.hits, outcome.corrupt, outcome.was_rebuilt) == (3, 1, False)


def test_two_rows_of_the_index_swapped(closed_specimen: Specimen) -> None:
    closed_specimen.restore()
    change_index(
        closed_specimen,
        "UPDATE entries SET slot = slot + 100 WHERE slot IN (0, 1)",
        "UPDATE entries SET slot = 101 - slot WHERE slot >= 100",
    )
    outcome = look_at(closed_specimen)
    assert outcome.hits == 2


def test_the_headers_of_two_rows_swapped(closed_specimen: Specimen) -> None:
    closed_specimen.restore()
    change_index(
        closed_specimen,
        "CREATE TABLE old AS SELECT * FROM entries",
        "UPDATE entries SET header = (SELECT header FROM old WHERE old.slot = 1 - entries.slot) "
        "WHERE slot < 2",
        "DROP TABLE old",
    )
    assert look_at(closed_specimen).hits == 2


def test_a_garbage_index_is_made_anew_with_all_chunks(closed_specimen: Specimen) -> None:
    closed_specimen.restore()
    (closed_specimen.folder / INDEX).write_bytes(b"garbage" * 3_000)
    with pytest.warns(UserWarning, match="is damaged"):
        tier = open_tier(closed_specimen.folder)
    with tier:
        assert all(read_right(tier, number) for number in closed_specimen.numbers)
        assert tier.check().good == MAX_CHUNKS
    with open_tier(closed_specimen.folder) as tier:  # and no warning the second time
        assert len(tier) == MAX_CHUNKS


def test_an_index_made_anew_leaves_out_what_is_damaged(closed_specimen: Specimen) -> None:
    closed_specimen.restore()
    closed_specimen.change(
        SLOTS, lambda data: data.__setitem__(SLOT_BYTES + 5_000, data[SLOT_BYTES + 5_000] ^ 1)
    )
    (closed_specimen.folder / INDEX).write_bytes(b"garbage" * 3_000)
    outcome = look_at(closed_specimen)
    assert (outcome.hits, outcome.was_rebuilt, outcome.corrupt) == (3, True, 0)


def change_index(specimen: Specimen, *statements: str, values: Sequence[object] = ()) -> None:
    connection = sqlite3.connect(specimen.folder / INDEX)
    for statement in statements:
        connection.execute(statement, values if "?" in statement else ())
    connection.commit()
    connection.close()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE meta SET value = x'00' WHERE name = 'clock'",
        "UPDATE meta SET value = 'abc' WHERE name = 'clock'",
        "UPDATE meta SET value = 9223372036854775807 WHERE name = 'clock'",
        "UPDATE meta SET value = -5 WHERE name = 'clock'",
        "DELETE FROM meta WHERE name = 'clock'",
        "UPDATE meta SET value = 'abc' WHERE name = 'num_slots'",
        "UPDATE meta SET value = 1000000 WHERE name = 'num_slots'",
        "DELETE FROM meta WHERE name = 'num_slots'",
        "DELETE FROM meta",
        "UPDATE entries SET slot = 'x' WHERE slot = 0",
        "UPDATE entries SET slot = 1.5 WHERE slot = 0",
        "UPDATE entries SET slot = x'00' WHERE slot = 0",
        "UPDATE entries SET slot = -1 WHERE slot = 0",
        "UPDATE entries SET slot = 4 WHERE slot = 0",
        "UPDATE entries SET slot = 9223372036854775807 WHERE slot = 0",
        "UPDATE entries SET header = 'text' WHERE slot = 0",
        "UPDATE entries SET header = x'' WHERE slot = 0",
        "UPDATE entries SET header = substr(header, 1, 100) WHERE slot = 0",
        "UPDATE entries SET header = header || x'00' WHERE slot = 0",
        "UPDATE entries SET used = x'00' WHERE slot = 0",
        "UPDATE entries SET used = 9223372036854775807 WHERE slot = 0",
        "UPDATE entries SET key = x'00' WHERE slot = 0",
        "UPDATE entries SET key = '' WHERE slot = 0",
        "UPDATE entries SET key = CAST(x'ff61' AS TEXT) WHERE slot = 0",
        "INSERT INTO claims VALUES (3, '')",
        "INSERT INTO claims VALUES (3, '.')",
        "INSERT INTO claims VALUES (3, '../slots.bin')",
        "INSERT INTO claims VALUES (3, x'00')",
        "INSERT INTO claims VALUES (3, 'a' || char(0) || 'b')",
        "INSERT INTO claims VALUES (3, CAST(x'ff61' AS TEXT))",
        "INSERT INTO claims VALUES (3, printf('%5000s', 'long'))",
        "INSERT INTO claims VALUES (77, 'nobody')",
        "INSERT INTO claims VALUES (-1, 'nobody')",
        "DROP TABLE claims",
        "DROP TABLE meta",
        "DROP TABLE entries",
        "ALTER TABLE entries RENAME COLUMN header TO head",
        "ALTER TABLE entries ADD COLUMN more TEXT",
    ],
)
def test_an_index_with_odd_values(statement: str, closed_specimen: Specimen) -> None:
    """SQLite finds nothing wrong with these; the tier must."""
    closed_specimen.restore()
    change_index(closed_specimen, statement)
    outcome = look_at(closed_specimen)
    assert (closed_specimen.folder / SLOTS).exists()
    if "entries SET" in statement:
        assert outcome.hits >= MAX_CHUNKS - 1, "the other chunks are still there"
    elif "entries" not in statement:
        assert outcome.hits == MAX_CHUNKS


def test_a_row_whose_record_is_larger_than_a_slot(closed_specimen: Specimen) -> None:
    """A header that is whole in itself, from a folder with larger slots."""
    closed_specimen.restore()
    with DiskTier(closed_specimen.folder / "other", max_chunks=1, slot_bytes=1 << 20) as other:
        big = chunk_of(9)
        big.past_key_values = big.past_key_values * 8
        assert other.write(big)
        header = other.entries()[0].header.raw
    change_index(
        closed_specimen, "UPDATE entries SET key = ?1, header = ?2 WHERE slot = 0", values=(key_of(9), header)
    )
    assert look_at(closed_specimen).hits == MAX_CHUNKS - 1


@pytest.mark.parametrize(
    ("place", "value"), [(16, 1), (18, 3), (19, 9), (20, 77), (44, 7), (56, 2), (56, 9), (60, 5), (96, 1)]
)
def test_a_wrong_byte_in_the_header_of_the_index(place: int, value: int, closed_specimen: Specimen) -> None:
    closed_specimen.restore()
    closed_specimen.change(INDEX, lambda data: data.__setitem__(place, value))
    look_at(closed_specimen)


def test_a_fresh_index_over_slots_of_an_unknown_version(closed_specimen: Specimen) -> None:
    """Slots of a later version are left out when the index is made anew."""
    closed_specimen.restore()
    closed_specimen.change(SLOTS, lambda data: struct.pack_into("<I", data, 8, 3))
    (closed_specimen.folder / INDEX).write_bytes(b"garbage" * 3_000)
    assert look_at(closed_specimen).hits == MAX_CHUNKS - 1


# --- neighbours and the folder under one's feet ----------------------------------------------------


def test_an_index_replaced_under_a_running_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process finds the index damaged and makes it anew while another has it open."""
    tier = open_tier(tmp_path / "cache")
    assert tier.write(chunk_of(0))
    with monkeypatch.context() as patch:
        found = iter([["page 3 is never used"]])
        patch.setattr(DiskIndex, "problems", lambda _index: next(found, []))
        with pytest.warns(UserWarning, match="is damaged"):
            other = open_tier(tmp_path / "cache")
    assert other.write(chunk_of(1))
    assert tier.refresh()
    assert other.write(chunk_of(2))
    with open_tier(tmp_path / "cache") as third:
        for one in (tier, other, third):
            assert all(read_right(one, number) for number in range(3))
        assert third.check().is_good
    other.close()
    tier.close()


def test_a_folder_made_anew_under_a_running_tier(tmp_path: Path) -> None:
    """Nothing wrong is served, the other's chunks are left alone, and both go on."""
    tier = open_tier(tmp_path / "cache")
    assert tier.write(chunk_of(0))
    shutil.rmtree(tmp_path / "cache")
    with open_tier(tmp_path / "cache") as other:
        assert other.write(chunk_of(1))
        read_right(tier, 1)
        read_right(tier, 1)
        assert tier.write(chunk_of(2))
        assert read_right(other, 2), other.stats()
        assert read_right(other, 1)
        with open_tier(tmp_path / "cache") as third:
            assert read_right(third, 1), "the good row of another was dropped"
    tier.close()


def test_slots_deleted_under_a_running_tier(tmp_path: Path) -> None:
    with open_tier(tmp_path / "cache") as tier:
        assert tier.write(chunk_of(0))
        (tmp_path / "cache" / SLOTS).unlink()
        with open_tier(tmp_path / "cache") as other:
            read_right(other, 0)
            assert other.write(chunk_of(1))
            read_right(tier, 1)
            assert read_right(other, 1)
            assert read_right(other, 1)
        with open_tier(tmp_path / "cache") as third:
            assert read_right(third, 1), "the good row of another was dropped"


def test_a_check_beside_a_writer_calls_nothing_corrupt(tmp_path: Path) -> None:
    with open_tier(tmp_path / "cache") as tier, open_tier(tmp_path / "cache") as other:
        assert all(tier.write(chunk_of(number)) for number in range(MAX_CHUNKS))

        def evict(done: int, _total: int) -> None:
            if done == 1:
                assert all(other.write(chunk_of(number)) for number in range(50, 50 + MAX_CHUNKS))

        report = tier.check(repair=True, progress=evict)
        assert report.corrupt == []
        assert all(read_right(other, number) for number in range(50, 50 + MAX_CHUNKS))


def test_a_clear_that_fails_never_writes_into_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it the tier must not use the number of a file that it closed."""
    with open_tier(tmp_path / "cache") as tier:
        assert tier.write(chunk_of(0))
        with monkeypatch.context() as patch:

            def full(*_args: object) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

            patch.setattr(os, "posix_fallocate", full)
            with contextlib.suppress(CacheFileError):
                tier.clear()
        with (tmp_path / "innocent").open("w+b") as innocent:
            tier.write(chunk_of(1))
            read_right(tier, 1)
            assert os.fstat(innocent.fileno()).st_size == 0
    check_recovered(tmp_path / "cache")


def test_use_after_closing_is_a_miss(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "cache")
    assert tier.write(chunk_of(0))
    tier.close()
    tier.close()
    with (tmp_path / "innocent").open("w+b") as innocent:
        assert tier.read(key_of(0)) is None
        assert not tier.write(chunk_of(1))
        tier.touch([key_of(0)])
        tier.remove([key_of(0)])
        tier.refresh()
        assert os.fstat(innocent.fileno()).st_size == 0
    check_recovered(tmp_path / "cache")
