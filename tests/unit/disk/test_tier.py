"""The disk tier: what goes in comes out, what is too much goes, and what cannot be used says so clearly."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.choices import BITS, KVBits
from kvboost.disk.serde import to_record
from kvboost.disk.tier import INDEX, SLOTS, DiskTier
from kvboost.errors import CacheFileError
from kvboost.kv.codec import KeptChunk, KVCodec
from kvboost.kv.layout import KVLayout
from kvboost.models import CachedChunk, chained_hash
from tests.faults.disk_writer import SLOT_BYTES, chunk_of, is_right, key_of
from tests.threads import in_threads
from tests.unit.fake_kv import past_of, user_chunk

OPEN_FILES = Path("/proc/self/fd")


def open_tier(folder: Path, max_chunks: int = 4, slot_bytes: int = SLOT_BYTES, **options: Any) -> DiskTier:
    return DiskTier(folder, max_chunks=max_chunks, slot_bytes=slot_bytes, **options)


def has(tier: DiskTier, number: int) -> bool:
    """Whether a chunk can be read; what is read must be right."""
    found = tier.read(key_of(number))
    assert found is None or is_right(found, number), f"chunk {number} is wrong"
    return found is not None


def held(tier: DiskTier, numbers: range) -> list[int]:
    return [number for number in numbers if has(tier, number)]


# --- in and out ------------------------------------------------------------------------------------


def test_a_chunk_comes_back_as_it_was(tmp_path: Path) -> None:
    chunk = chunk_of(3)
    chunk.access_count, chunk.recomputed, chunk.parent_hash = 4, True, "p" * 64
    with open_tier(tmp_path / "cache") as tier:
        assert tier.write(chunk) is True
        back = tier.read(chunk.prefix_hash)
    assert isinstance(back, CachedChunk)
    assert is_right(back, 3)
    for name in ("chunk_id", "text", "position_start", "position_end", "content_hash", "created_at"):
        assert getattr(back, name) == getattr(chunk, name), name
    assert (back.access_count, back.recomputed, back.parent_hash) == (4, True, "p" * 64)


def test_chunks_are_there_after_reopening_without_being_read(tmp_path: Path) -> None:
    with open_tier(tmp_path / "cache") as tier:
        assert all(tier.write(chunk_of(number)) for number in range(3))
    with open_tier(tmp_path / "cache") as tier:
        assert len(tier) == 3
        assert key_of(1) in tier
        assert "nonsense" not in tier
        assert {entry.header.key for entry in tier.entries()} == {key_of(number) for number in range(3)}
        entry = tier.entry(key_of(2))
        assert entry is not None
        assert entry.header.token_ids.tolist() == chunk_of(2).token_ids
        assert held(tier, range(5)) == [0, 1, 2]
        assert tier.stats()["misses"] == {"never stored": 2}


@pytest.mark.parametrize("bits", BITS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_every_width_and_type_is_stored_as_it_is_kept(
    bits: KVBits, dtype: torch.dtype, tmp_path: Path
) -> None:
    draw = torch.Generator().manual_seed(1)
    past = tuple(
        (
            torch.randn(1, heads, 33, dim, generator=draw).to(dtype),
            torch.randn(1, heads, 33, dim, generator=draw).to(dtype),
        )
        for heads, dim in ((1, 2), (2, 64))
    )
    layout = KVLayout.of(past)
    kv = KVCodec(layout, bits).encode(layout.pack(past))
    ids = list(range(33))
    chunk = KeptChunk(
        kv,
        chunk_id="k",
        text="",
        token_ids=ids,
        position_start=0,
        position_end=33,
        prefix_hash=chained_hash(ids),
    )
    with open_tier(tmp_path / "cache", 2, 1 << 18) as tier:
        assert tier.write(chunk)
    with open_tier(tmp_path / "cache", 2, 1 << 18) as tier:
        back = tier.read(chained_hash(ids))
    assert isinstance(back, KeptChunk)
    assert back.kv.codec.bits == bits
    assert back.memory_bytes() == kv.nbytes, "it was not expanded"
    for tensor, wanted in zip(back.kv.tensors, kv.tensors, strict=True):
        assert torch.equal(tensor, wanted)
    for pair, wanted_pair in zip(back.past_key_values, chunk.past_key_values, strict=True):
        for tensor, wanted in zip(pair, wanted_pair, strict=True):
            assert tensor.dtype == dtype
            assert torch.equal(tensor, wanted)


def test_reads_do_not_share_memory(tmp_path: Path) -> None:
    with open_tier(tmp_path / "cache") as tier:
        tier.write(chunk_of(0))
        first = tier.read(key_of(0))
        assert first is not None
        first.past_key_values[0][0].zero_()
        assert has(tier, 0)


def test_the_device_is_that_of_the_call(tmp_path: Path) -> None:
    with open_tier(tmp_path / "cache") as tier:
        tier.write(chunk_of(0))
        for device in ("cpu", torch.device("cpu")):
            back = tier.read(key_of(0), device=device)
            assert back is not None
            assert back.past_key_values[0][0].device.type == "cpu"
        elsewhere = tier.read(key_of(0), device="meta")
        assert elsewhere is not None
        assert {t.device.type for pair in elsewhere.past_key_values for t in pair} == {"meta"}


def test_a_codec_keeps_other_forms_out(tmp_path: Path) -> None:
    """Another layout or width in one folder is left alone, and never served."""
    chunk = chunk_of(0)
    layout = KVLayout.of(chunk.past_key_values)
    with open_tier(tmp_path / "cache") as tier:
        tier.write(chunk)
        tier.write(user_chunk(range(4), 0, 4))
    with open_tier(tmp_path / "cache", codec=KVCodec(layout)) as tier:
        assert has(tier, 0)
        assert tier.read(chained_hash(range(4))) is None
        assert tier.stats()["misses"] == {"other encoding": 1}
    with open_tier(tmp_path / "cache", codec=KVCodec(layout, 8)) as tier:
        assert not has(tier, 0)
        assert len(tier) == 2
    with open_tier(tmp_path / "cache") as tier:
        assert has(tier, 0)


def test_writing_again_changes_nothing(tmp_path: Path) -> None:
    with open_tier(tmp_path / "cache") as tier:
        assert tier.write(chunk_of(0))
        before = tier.entries()
        assert tier.write(chunk_of(0))
        assert tier.entries() == before
        assert tier.write_records([to_record(chunk_of(1))] * 3) == [True] * 3
        assert len(tier) == 2


def test_chunks_that_make_no_sense_are_refused_with_a_reason(tmp_path: Path) -> None:
    ids_missing = chunk_of(1)
    ids_missing.token_ids = list(ids_missing.token_ids)[:-1]
    empty = CachedChunk("k", "", [], past_of([], 0, 0), 0, 0, "k")
    with open_tier(tmp_path / "cache") as tier:
        assert tier.write(ids_missing) is False
        assert tier.write(empty) is False
        assert sum(tier.stats()["refused"].values()) == 2
        assert (len(tier), tier.check().free) == (0, 4)


# --- room ------------------------------------------------------------------------------------------


def test_a_chunk_larger_than_a_slot_is_refused_with_a_reason(tmp_path: Path) -> None:
    with open_tier(tmp_path / "cache", slot_bytes=8_192) as tier:
        assert tier.write(chunk_of(0)) is False
        small = user_chunk(range(4), 0, 4)
        assert tier.write_records([to_record(chunk_of(1)), to_record(small)]) == [False, True]
        assert tier.stats()["refused"] == {"larger than a slot": 2}
        assert tier.read(key_of(0)) is None


def test_a_chunk_that_fills_its_slot_to_the_last_byte(tmp_path: Path) -> None:
    size = to_record(chunk_of(0)).header.record_bytes
    with open_tier(tmp_path / "fits", 2, size) as tier:
        assert all(tier.write(chunk_of(number)) for number in range(2))
        assert held(tier, range(2)) == [0, 1]
    with open_tier(tmp_path / "short", 2, size - 1) as tier:
        assert not tier.write(chunk_of(0))


def test_a_header_of_several_pages(tmp_path: Path) -> None:
    chunk = chunk_of(0)
    chunk.text = "x" * 9_000
    with open_tier(tmp_path / "cache") as tier:
        assert tier.write(chunk)
        back = tier.read(key_of(0))
        assert back is not None
        assert back.text == chunk.text
    (tmp_path / "cache" / INDEX).write_bytes(b"garbage" * 500)
    with pytest.warns(UserWarning, match="is damaged"), open_tier(tmp_path / "cache") as tier:
        assert has(tier, 0)


def test_no_room_at_all(tmp_path: Path) -> None:
    with open_tier(tmp_path / "cache", max_chunks=0) as tier:
        assert tier.write(chunk_of(0)) is False
        assert tier.read(key_of(0)) is None
        assert tier.stats()["refused"] == {"no room": 1}
        assert tier.check().is_good
        tier.clear()
        assert (tmp_path / "cache" / SLOTS).stat().st_size == 0


def test_what_was_written_longest_ago_makes_room(tmp_path: Path) -> None:
    with open_tier(tmp_path / "cache") as tier:
        assert all(tier.write(chunk_of(number)) for number in range(7))
        assert held(tier, range(7)) == [3, 4, 5, 6]
        assert len(tier) == 4


def test_what_was_touched_stays(tmp_path: Path) -> None:
    with open_tier(tmp_path / "cache") as tier:
        for number in range(4):
            tier.write(chunk_of(number))
        tier.touch([key_of(0), key_of(2), "nonsense"])
        tier.write(chunk_of(4))
        tier.write(chunk_of(5))
        assert held(tier, range(6)) == [0, 2, 4, 5]
    with open_tier(tmp_path / "cache") as tier:  # the order outlives the process
        tier.touch([key_of(0)])
        tier.write(chunk_of(6))
        assert held(tier, range(7)) == [0, 4, 5, 6]


def test_of_what_was_written_together_the_last_goes_first(tmp_path: Path) -> None:
    """A child without its parent is of no use, a parent without its child is."""
    with open_tier(tmp_path / "cache") as tier:
        tier.write_records([to_record(chunk_of(number)) for number in range(4)])
        for number, left in ((10, [0, 1, 2]), (11, [0, 1]), (12, [0])):
            tier.write(chunk_of(number))
            assert held(tier, range(4)) == left


def test_children_touched_together_with_their_parents_go_first(tmp_path: Path) -> None:
    with open_tier(tmp_path / "cache") as tier:
        tier.write_records([to_record(chunk_of(number)) for number in range(4)])
        tier.touch([key_of(number) for number in range(4)])
        tier.write(chunk_of(10))
        assert held(tier, range(4)) == [0, 1, 2]


def test_more_than_fits_keeps_the_first(tmp_path: Path) -> None:
    with open_tier(tmp_path / "cache", max_chunks=2) as tier:
        tier.write(chunk_of(9))
        written = tier.write_records([to_record(chunk_of(number)) for number in range(4)])
        assert written == [True, True, False, False]
        assert held(tier, range(10)) == [0, 1]
        assert tier.stats()["refused"] == {"no room": 2}


def test_a_parent_that_is_there_is_not_evicted_for_its_child(tmp_path: Path) -> None:
    with open_tier(tmp_path / "cache", max_chunks=2) as tier:
        tier.write(chunk_of(0))
        tier.write(chunk_of(1))
        assert tier.write_records([to_record(chunk_of(0)), to_record(chunk_of(2))]) == [True, True]
        assert held(tier, range(3)) == [0, 2]


def test_removing_makes_room(tmp_path: Path) -> None:
    with open_tier(tmp_path / "cache") as tier:
        for number in range(4):
            tier.write(chunk_of(number))
        tier.remove([key_of(1), key_of(3), "nonsense"])
        assert held(tier, range(4)) == [0, 2]
        assert tier.check().free == 2
        tier.write_records([to_record(chunk_of(4)), to_record(chunk_of(5))])
        assert held(tier, range(6)) == [0, 2, 4, 5]


class Model:
    """What the tier should hold: an ordered dict with the same rules."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.held: list[int] = []  # used longest ago first

    def write(self, number: int) -> None:
        if number not in self.held:
            self.held = [*self.held[max(0, len(self.held) + 1 - self.size) :], number]

    def touch(self, number: int) -> None:
        if number in self.held:
            self.held.remove(number)
            self.held.append(number)


@given(st.lists(st.tuples(st.sampled_from("wtrxo"), st.integers(0, 5)), max_size=25), st.integers(1, 4))
@settings(deadline=None, max_examples=40)
def test_any_order_of_calls_does_what_a_list_would(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]], size: int
) -> None:
    folder = tmp_path_factory.mktemp("tier") / "cache"
    model, tier = Model(size), open_tier(folder, size)
    for step, number in steps:
        if step == "w":
            assert tier.write(chunk_of(number))
            model.write(number)
        elif step == "t":
            tier.touch([key_of(number)])
            model.touch(number)
        elif step == "x":
            tier.remove([key_of(number)])
            model.held = [one for one in model.held if one != number]
        elif step == "o":
            tier.close()
            tier = open_tier(folder, size)
        assert held(tier, range(6)) == sorted(model.held)
    report = tier.check()
    assert (report.good, report.free, report.is_good) == (len(model.held), size - len(model.held), True)
    tier.close()


# --- sizes, numbers, modes -------------------------------------------------------------------------


def test_the_file_has_its_full_size_from_the_start(tmp_path: Path) -> None:
    with open_tier(tmp_path / "cache"):
        found = (tmp_path / "cache" / SLOTS).stat()
    assert found.st_size == 4 * SLOT_BYTES
    assert found.st_blocks * 512 >= 4 * SLOT_BYTES, "the blocks are set aside"


@pytest.mark.parametrize(("after", "left"), [(2, [0, 1]), (8, [0, 1, 2, 3]), (0, []), (4, [0, 1, 2, 3])])
def test_reopening_with_another_number_of_slots(after: int, left: list[int], tmp_path: Path) -> None:
    with open_tier(tmp_path / "cache") as tier:
        for number in range(4):
            tier.write(chunk_of(number))
    with open_tier(tmp_path / "cache", max_chunks=after) as tier:
        assert held(tier, range(4)) == left
        assert (tmp_path / "cache" / SLOTS).stat().st_size == after * SLOT_BYTES
        report = tier.check()
        assert (report.good, report.free, report.is_good) == (len(left), after - len(left), True)
        for number in range(10, 10 + after):
            assert tier.write(chunk_of(number))
        assert len(tier) == after
    with open_tier(tmp_path / "cache") as tier:
        assert tier.check().is_good


def test_neighbours_with_different_numbers_of_slots(tmp_path: Path) -> None:
    """The last to open decides; nobody fails, and nobody drops what another has."""
    with open_tier(tmp_path / "cache", 2) as small, open_tier(tmp_path / "cache", 4) as large:
        assert all(large.write(chunk_of(number)) for number in range(4))
        small.refresh()
        small.read("nonsense")
        assert held(large, range(4)) == [0, 1, 2, 3]
        for number in range(10, 15):
            small.write(chunk_of(number))
            assert has(small, number) == (key_of(number) in small)
        assert large.check().is_good
        with open_tier(tmp_path / "cache", 4) as third:
            assert len(third) == 4
    with open_tier(tmp_path / "cache", 4) as large, open_tier(tmp_path / "cache", 1) as small:
        for number in range(20, 24):
            large.write(chunk_of(number))
            small.write(chunk_of(number + 10))
        held(large, range(40))
        held(small, range(40))


def test_clear_forgets_everything_and_goes_on(tmp_path: Path) -> None:
    with open_tier(tmp_path / "cache") as tier, open_tier(tmp_path / "cache") as other:
        for number in range(4):
            tier.write(chunk_of(number))
        assert has(other, 2)
        tier.clear()
        assert (len(tier), tier.check().free) == (0, 4)
        assert held(tier, range(4)) == []
        assert held(other, range(4)) == []
        assert not any((tmp_path / "cache" / SLOTS).read_bytes()), "the bytes are gone"
        assert tier.write(chunk_of(5))
        assert has(other, 5)


def test_stats_count_everything(tmp_path: Path) -> None:
    with open_tier(tmp_path / "cache") as tier:
        tier.write(chunk_of(0))
        tier.read("nonsense")
        stats = tier.stats()
    assert stats["folder"] == str(tmp_path / "cache")
    assert (stats["chunks"], stats["max_chunks"]) == (1, 4)
    assert stats["bytes"] == to_record(chunk_of(0)).header.record_bytes
    assert stats["allocated_bytes"] == 4 * SLOT_BYTES
    assert (stats["misses"], stats["refused"]) == ({"never stored": 1}, {})


def test_check_reports_its_progress(tmp_path: Path) -> None:
    with open_tier(tmp_path / "cache") as tier:
        for number in range(3):
            tier.write(chunk_of(number))
        told: list[tuple[int, int]] = []
        report = tier.check(progress=lambda done, total: told.append((done, total)))
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert (report.slots, report.good, report.free, report.corrupt) == (4, 3, 1, [])


@pytest.mark.parametrize("made_before", [False, True])
def test_only_the_owner_can_look(made_before: bool, tmp_path: Path) -> None:
    """Files are 0600 even in a folder that others may enter; folders that the tier makes are 0700."""
    folder = tmp_path / "a" / "cache"
    if made_before:
        folder.mkdir(parents=True)
        folder.chmod(0o755)
    before = os.umask(0o022)
    try:
        with open_tier(folder) as tier:
            tier.write(chunk_of(0))
            modes = {path: stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}
        (folder / INDEX).write_bytes(b"garbage" * 500)
        with pytest.warns(UserWarning, match="is damaged"), open_tier(folder):
            modes |= {path: stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}
    finally:
        os.umask(before)
    assert any(path.name == f"{INDEX}-wal" for path in modes)
    for path, mode in modes.items():
        assert mode == (0o700 if path.is_dir() else 0o600), path
    if not made_before:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700


def test_nothing_is_pickled(tmp_path: Path) -> None:
    with open_tier(tmp_path / "cache") as tier:
        tier.write(chunk_of(0))
    for path in (tmp_path / "cache").rglob("*"):
        if path.is_file():
            assert b"torch" not in path.read_bytes(), path
            assert b"\x80\x04\x95" not in path.read_bytes(), path


# --- folders that cannot be used -------------------------------------------------------------------


def refusal(folder: Path, **options: Any) -> str:
    """The message; it must be one line that says what to do, and leave nothing open."""
    before = len(os.listdir(OPEN_FILES)) if OPEN_FILES.exists() else 0
    with pytest.raises(CacheFileError) as raised:
        open_tier(folder, **options)
    after = len(os.listdir(OPEN_FILES)) if OPEN_FILES.exists() else 0
    assert after == before, "files stay open"
    owners = folder / "owners"
    assert not owners.is_dir() or os.listdir(owners) == []
    message = str(raised.value)
    assert "\n" not in message
    assert str(folder) in message
    assert re.search(r"\b(use|choose|give|free|lower|clear|needs a folder|allow)\b", message), message
    return message


def test_another_slot_size_is_refused_and_costs_nothing(tmp_path: Path) -> None:
    with open_tier(tmp_path / "cache") as tier:
        for number in range(4):
            tier.write(chunk_of(number))
    for slot_bytes in (4_096, SLOT_BYTES // 2, SLOT_BYTES * 2):
        message = refusal(tmp_path / "cache", slot_bytes=slot_bytes)
        assert str(slot_bytes) in message
        assert str(SLOT_BYTES) in message
    with open_tier(tmp_path / "cache") as tier:
        assert held(tier, range(4)) == [0, 1, 2, 3]


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    assert "is a file" in refusal(tmp_path / "cache")
    assert (tmp_path / "cache").read_text() == "a file"
    refusal(tmp_path / "cache" / "below")


@pytest.mark.parametrize("name", [SLOTS, INDEX, "owners", "opening"])
def test_something_else_in_place_of_a_file(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    if name == "owners":
        (folder / name).write_text("a file")
    else:
        (folder / name / "sub").mkdir(parents=True)
    before = sorted(folder.rglob("*"))
    refusal(folder)
    assert sorted(folder.rglob("*")) == before


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    if os.geteuid() == 0:  # nothing is forbidden to root
        monkeypatch.setattr(os, "access", lambda *_args, **_options: False)
    else:
        folder.chmod(0o500)
    message = refusal(folder)
    assert "written" in message
    assert os.listdir(folder) == []


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EIO, errno.EMFILE])
def test_a_folder_in_which_nothing_can_be_opened(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: Any, *args: Any, **options: Any) -> int:
        if str(path).startswith(str(tmp_path)):
            raise OSError(number, os.strerror(number))
        return real(path, *args, **options)

    (tmp_path / "cache").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        assert os.strerror(number) in refusal(tmp_path / "cache")
    open_tier(tmp_path / "cache").close()


@pytest.mark.parametrize("exists", [False, True])
def test_a_full_disk_shows_at_the_start(
    exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if exists:
        with open_tier(tmp_path / "cache") as tier:
            assert all(tier.write(chunk_of(number)) for number in range(4))
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        message = refusal(tmp_path / "cache", max_chunks=100)
    assert "3.3 MB" in message
    assert "free" in message
    with open_tier(tmp_path / "cache") as tier:
        assert held(tier, range(4)) == ([0, 1, 2, 3] if exists else [])
        assert tier.write(chunk_of(5))


def test_a_system_that_cannot_set_blocks_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_args: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    with open_tier(tmp_path / "one") as tier:
        assert tier.write(chunk_of(0))
        assert has(tier, 0)
    monkeypatch.delattr(os, "posix_fallocate")
    with open_tier(tmp_path / "two") as tier:
        assert tier.write(chunk_of(0))
        assert (tmp_path / "two" / SLOTS).stat().st_size == 4 * SLOT_BYTES


@pytest.mark.parametrize(
    "options",
    [
        {"max_chunks": -1},
        {"max_chunks": 2.0},
        {"max_chunks": True},
        {"max_chunks": None},
        {"slot_bytes": 0},
        {"slot_bytes": 4_095},
        {"slot_bytes": "10"},
    ],
    ids=str,
)
def test_sizes_that_make_no_sense(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CacheFileError, match=next(iter(options))):
        open_tier(tmp_path / "cache", **options)
    assert not (tmp_path / "cache").exists()


# --- neighbours ------------------------------------------------------------------------------------


def test_two_tiers_see_each_others_chunks(tmp_path: Path) -> None:
    with open_tier(tmp_path / "cache") as one, open_tier(tmp_path / "cache") as two:
        assert one.write(chunk_of(0))
        assert has(two, 0)
        assert two.write(chunk_of(1))
        assert key_of(1) not in one
        assert one.refresh()
        assert key_of(1) in one
        assert not one.refresh(), "nothing is new"
        assert two.write(chunk_of(0)), "it is there already"
        assert one.check().good == 2


def test_what_a_neighbour_evicted_is_a_miss(tmp_path: Path) -> None:
    with open_tier(tmp_path / "cache") as one, open_tier(tmp_path / "cache") as two:
        for number in range(4):
            one.write(chunk_of(number))
        for number in range(10, 14):
            two.write(chunk_of(number))
        assert held(one, range(4)) == []
        assert "corrupt" not in one.stats()["misses"]
        assert held(one, range(14)) == [10, 11, 12, 13]


def test_what_a_neighbour_moved_is_found(tmp_path: Path) -> None:
    with open_tier(tmp_path / "cache") as one, open_tier(tmp_path / "cache") as two:
        one.write(chunk_of(0))
        assert has(two, 0)
        one.remove([key_of(0)])
        one.write(chunk_of(1))  # into the slot where it was
        one.write(chunk_of(0))
        assert has(two, 0)


def test_two_writers_of_the_same_chunk_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them wins; no slot is lost, and both can read it."""
    with open_tier(tmp_path / "cache") as one, open_tier(tmp_path / "cache") as two:
        real = one._slots.sync

        def meanwhile() -> None:
            assert two.write(chunk_of(0))
            real()

        with monkeypatch.context() as patch:
            patch.setattr(one._slots, "sync", meanwhile)
            assert one.write(chunk_of(0))
        for tier in (one, two):
            assert has(tier, 0)
        report = one.check()
        assert (report.good, report.free, report.writing) == (1, 3, 0)
        for number in range(1, 4):
            assert two.write(chunk_of(number))
        assert held(two, range(4)) == [0, 1, 2, 3]
        assert held(one, range(4)) == [0, 1, 2, 3]


def test_threads_share_a_tier(tmp_path: Path) -> None:
    with open_tier(tmp_path / "cache") as tier:

        def work(seed: int) -> None:
            for step in range(40):
                number = (seed * 7 + step) % 9
                if (seed + step) % 2:
                    assert tier.write(chunk_of(number))
                else:
                    has(tier, number)

        in_threads(6, work)
        report = tier.check()
        assert (report.good, report.free, report.writing, report.is_good) == (4, 0, 0, True)
        assert "corrupt" not in tier.stats()["misses"]
