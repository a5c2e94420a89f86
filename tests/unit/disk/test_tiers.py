"""What holds for every tier in the table, and which of them an address opens.

The example of docs/contributing.md is checked too: it is what new tiers are made from.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvboost.disk import tiers
from kvboost.disk.chunk_tier import CORRUPT, GONE, ChunkTier, TierSpec
from kvboost.disk.serde import Record, to_record
from kvboost.disk.tier import DiskTier
from kvboost.disk.tiers import TIERS, Opener, open_tier, slot_bytes_for
from kvboost.errors import InvalidRequestError
from kvboost.kv.codec import KeptChunk, KVCodec
from kvboost.kv.layout import KVLayout
from kvboost.settings import EngineSettings
from tests.engine.disk.on_disk import answers_as_baseline, flush, go_cold
from tests.faults.disk_writer import SLOT_BYTES, chunk_of, is_right, key_of, kv_of
from tests.fixture_types import MakeEngine
from tests.threads import in_threads

PAGE = Path(__file__).parents[3] / "docs" / "contributing.md"
EXAMPLE = "example"
CODEC = KVCodec(KVLayout.of(kv_of(0)))
MAX_CHUNKS = 4
TEXT = list(range(2, 66))  # four chunks of 16 tokens
Open = Callable[..., ChunkTier]


def example_of_the_page() -> Opener:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    block = next(block for block in blocks if "(ChunkTier)" in block)
    scope: dict[str, Any] = {"__name__": "page"}
    exec(compile(block, str(PAGE), "exec", dont_inherit=True), scope)
    made: Opener = next(
        thing
        for thing in scope.values()
        if isinstance(thing, type) and issubclass(thing, ChunkTier) and thing is not ChunkTier
    )
    return made


@pytest.fixture(params=[*TIERS, EXAMPLE], ids=lambda name: name or "folder")
def scheme(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == EXAMPLE:
        monkeypatch.setitem(TIERS, EXAMPLE, example_of_the_page())
    return str(request.param)


@pytest.fixture
def opened(scheme: str, tmp_path: Path) -> Iterator[Open]:
    """Tiers in one place, for `MAX_CHUNKS` chunks each."""
    made: list[ChunkTier] = []

    def open_one(name: str = "model", **changes: Any) -> ChunkTier:
        spec = TierSpec(name, CODEC, SLOT_BYTES, MAX_CHUNKS * SLOT_BYTES)
        made.append(TIERS[scheme](str(tmp_path / "place"), dataclasses.replace(spec, **changes)))
        return made[-1]

    yield open_one
    for tier in made:
        tier.close()


@cache
def record_of(number: int) -> Record:
    return to_record(chunk_of(number), namespace="root", content="text")


def write(tier: ChunkTier, *numbers: int) -> list[bool]:
    return list(tier.write_records([record_of(number) for number in numbers]))


def has(tier: ChunkTier, number: int) -> bool:
    """Whether a chunk can be read; what is read must be right."""
    found = tier.load_or_reason(key_of(number))
    if isinstance(found, str):
        return False
    assert is_right(found, number), f"chunk {number} is wrong"
    return True


def held(tier: ChunkTier) -> set[str]:
    """The keys that it says it has; all can be read."""
    keys = {header.key for header in tier.headers()}
    assert keys == {key_of(number) for number in range(20) if key_of(number) in tier}
    assert keys == {key_of(number) for number in range(20) if has(tier, number)}
    assert tier.stats()["chunks"] == len(keys)
    return keys


def keys_of(*numbers: int) -> set[str]:
    return {key_of(number) for number in numbers}


# --- every tier ------------------------------------------------------------------------------------


def test_what_was_written_comes_back_equal(opened: Open) -> None:
    tier = opened()
    assert tier.headers() == []
    assert write(tier, 1, 2) == [True, True]
    assert held(tier) == keys_of(1, 2)
    found = tier.load_or_reason(key_of(1))
    assert isinstance(found, KeptChunk)
    assert found.kv.codec.keeps_form_of(CODEC)
    header = next(header for header in tier.headers() if header.key == key_of(1))
    assert header.raw == record_of(1).header.raw
    assert tier.stats()["bytes"] == 2 * header.record_bytes
    assert tier.stats()["refused"] == {}


def test_it_is_there_when_the_place_is_opened_again(opened: Open) -> None:
    one = opened()
    write(one, 1, 2)
    one.close()
    two = opened()
    assert held(two) == keys_of(1, 2)
    assert write(two, 2, 3) == [True, True]
    assert held(two) == keys_of(1, 2, 3)


def test_reads_do_not_share_memory(opened: Open) -> None:
    tier = opened()
    write(tier, 1)
    found = tier.load_or_reason(key_of(1))
    assert isinstance(found, KeptChunk)
    for tensor in found.kv.tensors:
        tensor.zero_()
    assert has(tier, 1)


def test_damage_is_a_counted_miss(opened: Open) -> None:
    tier = opened()
    whole = record_of(1)
    payload = [memoryview(bytearray(part)) for part in whole.payload]
    payload[-1][-1] ^= 0x10
    tier.write_records([Record(whole.header, tuple(payload))])
    assert tier.load_or_reason(key_of(1)) == CORRUPT
    assert tier.stats()["misses"] == {CORRUPT: 1}
    assert key_of(1) not in tier
    assert tier.headers() == []
    assert write(tier, 1) == [True], "it can be saved again"
    assert has(tier, 1)


def test_what_another_chunk_left_is_no_hit(opened: Open) -> None:
    tier = opened()
    tier.write_records([Record(record_of(1).header, record_of(2).payload)])
    assert tier.load_or_reason(key_of(1)) == CORRUPT


def test_keys_that_are_not_there_are_no_error(opened: Open) -> None:
    tier = opened()
    write(tier, 1)
    assert key_of(2) not in tier
    assert tier.load_or_reason(key_of(2)) == GONE
    assert tier.stats()["misses"] == {GONE: 1}
    tier.touch([key_of(2)])
    tier.remove([key_of(2)])
    assert tier.take_evicted() == []
    assert held(tier) == keys_of(1)


def test_the_budget_holds_and_what_made_room_is_told(opened: Open) -> None:
    tier = opened()
    for number in range(10):
        assert write(tier, number) == [True]
        assert len(tier.headers()) <= MAX_CHUNKS
        assert tier.stats()["bytes"] <= MAX_CHUNKS * SLOT_BYTES
        tier.touch([key_of(number)])
    kept = held(tier)
    assert key_of(9) in kept
    evicted = tier.take_evicted()
    assert sorted(evicted) == sorted(keys_of(*range(10)) - kept)
    assert tier.take_evicted() == []


def test_more_at_once_than_there_is_room_for(opened: Open) -> None:
    tier = opened()
    written = write(tier, *range(10))
    there = held(tier)
    assert 0 < len(there) <= MAX_CHUNKS
    assert there == {key_of(number) for number in range(10) if written[number]}


def test_a_record_that_is_too_large_is_refused(opened: Open) -> None:
    whole = record_of(1)
    tier = opened(record_bytes=whole.header.record_bytes - 1)
    assert write(tier, 1) == [False]
    assert sum(tier.stats()["refused"].values()) == 1
    assert held(tier) == set()


def test_removed_and_cleared(opened: Open) -> None:
    tier = opened()
    write(tier, 1, 2, 3)
    tier.remove([key_of(1)])
    assert held(tier) == keys_of(2, 3)
    tier.clear()
    assert held(tier) == set()
    assert write(tier, 1) == [True]
    assert held(tier) == keys_of(1)


def test_nothing_is_found_or_written_after_closing(opened: Open) -> None:
    tier = opened()
    write(tier, 1)
    tier.close()
    tier.close()
    assert held(tier) == set()
    assert write(tier, 1, 2) == [False, False]
    assert sum(tier.stats()["refused"].values()) == 2
    tier.touch([key_of(1)])
    tier.remove([key_of(1)])
    assert tier.refresh() is False
    assert held(opened()) == keys_of(1), "a closed tier changes nothing"


def test_other_models_in_one_place_are_apart(opened: Open) -> None:
    ours, other = opened("ours", max_bytes=None), opened("other", max_bytes=None)
    write(ours, 1)
    write(other, 2)
    assert held(ours) == keys_of(1)
    other.clear()
    assert held(ours) == keys_of(1)


def test_many_threads(opened: Open) -> None:
    tier = opened()

    def work(seed: int) -> None:
        for step in range(30):
            number = (seed * 7 + step) % 8
            write(tier, number)
            has(tier, (number + seed) % 8)
            tier.touch([header.key for header in tier.headers()])
            tier.take_evicted()
            tier.stats()
            if step % 5 == seed % 5:
                tier.remove([key_of(number)])
            assert len(tier.headers()) <= MAX_CHUNKS

    in_threads(4, work)
    assert CORRUPT not in tier.stats()["misses"]
    held(tier)


# --- behind an engine ------------------------------------------------------------------------------


def address(scheme: str, folder: Path) -> str:
    return f"{scheme}://{folder}" if scheme else str(folder)


def test_an_engine_answers_from_what_another_one_saved(
    scheme: str, make_engine: MakeEngine, tmp_path: Path
) -> None:
    where = address(scheme, tmp_path / "disk")
    one = make_engine(disk_cache_dir=where)
    answers_as_baseline(one, TEXT)
    one.close()
    two = make_engine(disk_cache_dir=where)
    assert answers_as_baseline(two, TEXT).cached_tokens == len(TEXT) - 1
    assert two.cache_stats()["disk"]["misses"] == {}
    two.clear()
    assert two.cache_stats()["disk"]["chunks"] == 0


@pytest.mark.parametrize("method", ["load_or_reason", "write_records", "touch", "remove", "refresh"])
def test_an_error_of_a_tier_is_a_miss(
    scheme: str, method: str, make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(disk_cache_dir=address(scheme, tmp_path / "disk"))
    answers_as_baseline(engine, TEXT)
    go_cold(engine)

    def fail(*_arguments: Any) -> Any:
        raise ConnectionResetError("gone")

    assert engine.core.parts.disk is not None
    monkeypatch.setattr(engine.core.parts.disk.tier, method, fail)
    result = answers_as_baseline(engine, TEXT)
    assert (result.cached_tokens == 0) == (method == "load_or_reason")
    answers_as_baseline(engine, [*TEXT, 70, 71, 72])
    if method == "load_or_reason":
        assert "ConnectionResetError" in engine.cache_stats()["misses"]


def test_chunks_that_made_room_are_forgotten(scheme: str, make_engine: MakeEngine, tmp_path: Path) -> None:
    where = address(scheme, tmp_path / "disk")
    engine = make_engine(disk_cache_dir=where, disk_cache_bytes=5 * 16_384)
    for start in range(0, 300, 50):
        answers_as_baseline(engine, [start % 60 + place % 30 + 2 for place in range(64)])
        flush(engine)
        assert engine.cache_stats()["disk"]["chunks"] <= 5
    go_cold(engine)
    assert engine.cache_stats()["disk"]["misses"] == {}


def test_a_tier_of_ones_own_needs_all_methods() -> None:
    incomplete: Any = type("Incomplete", (ChunkTier,), {"stats": dict})
    with pytest.raises(TypeError, match="write_records"):
        incomplete()


# --- addresses -------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The schemes and places that were opened; nothing is."""
    seen: list[tuple[str, str]] = []

    def noted(scheme: str) -> Opener:
        def note(place: str, _wanted: TierSpec) -> Any:
            seen.append((scheme, place))

        return note

    monkeypatch.setattr(tiers, "TIERS", {name: noted(name) for name in ("", "s3", "a+b")})
    return seen


@pytest.mark.parametrize(
    ("given", "scheme", "place"),
    [
        ("kv", "", "kv"),
        ("", "", ""),
        (Path("kv") / "s3", "", "kv/s3"),
        ("C://kv", "", "C://kv"),
        ("c://kv", "", "c://kv"),
        (r"C:\kv", "", r"C:\kv"),
        ("s3:kv", "", "s3:kv"),
        ("s3:/kv", "", "s3:/kv"),
        (Path("s3://kv"), "", "s3:/kv"),
        ("S3://kv", "", "S3://kv"),
        ("./s3://kv", "", "./s3://kv"),
        ("kv/s3://kv", "", "kv/s3://kv"),
        ("s3://kv/one?two#three", "s3", "kv/one?two#three"),
        ("s3://", "s3", ""),
        ("a+b://s3://kv", "a+b", "s3://kv"),
    ],
)
def test_only_a_scheme_is_no_path(given: Any, scheme: str, place: str, asked: list[tuple[str, str]]) -> None:
    open_tier(EngineSettings(disk_cache_dir=given), CODEC, "f" * 64)
    assert asked == [(scheme, place)]


@pytest.mark.usefixtures("asked")
def test_an_unknown_scheme_is_told_with_those_that_are_known() -> None:
    with pytest.raises(InvalidRequestError, match=r"a folder or s3://\.\.\. or a\+b://\.\.\., got 'gopher"):
        open_tier(EngineSettings(disk_cache_dir="gopher://kv"), CODEC, "f" * 64)


def test_an_unknown_scheme_makes_no_folder(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidRequestError, match=r"\./gopher://kv"):
        make_engine(disk_cache_dir="gopher://kv")
    assert list(tmp_path.iterdir()) == []
    make_engine(disk_cache_dir="./gopher://kv")
    assert (tmp_path / "gopher:" / "kv").is_dir()


def test_the_folder_has_the_name_and_the_size_of_the_engines_chunks(tmp_path: Path) -> None:
    settings = EngineSettings(disk_cache_dir=tmp_path / "disk", chunk_size=16, chunk_boundary_window=2)
    slot_bytes = slot_bytes_for(CODEC, 20)
    tier = open_tier(settings, CODEC, "f" * 64, label="a model")
    assert isinstance(tier, DiskTier)
    with tier:
        assert tier.folder == tmp_path / "disk" / f"{'f' * 24}-16-{slot_bytes}"
        assert (tier.slot_bytes, tier.max_chunks, tier.label) == (slot_bytes, 256, "a model")
    tier = open_tier(dataclasses.replace(settings, disk_cache_bytes=3 * slot_bytes + 1), CODEC, "f" * 64)
    assert isinstance(tier, DiskTier)
    with tier:
        assert tier.max_chunks == 3
    too_small = dataclasses.replace(settings, disk_cache_bytes=slot_bytes - 1)
    with pytest.raises(InvalidRequestError, match=f"at least {slot_bytes}"):
        open_tier(too_small, CODEC, "f" * 64)
