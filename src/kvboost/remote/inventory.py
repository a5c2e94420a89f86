"""What a shared store holds, for those who look after it: told from names and values alone, without a model.

Names say whose they are and what kind; records say the rest in headers of their own. A salt is not needed,
only the prefix of a tenant where one is meant. Knows names, parts and places, no engine.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from kvboost.remote import parts
from kvboost.remote.byte_store import ByteStore
from kvboost.remote.fingerprints import TailPlace, WindowPlace
from kvboost.remote.keys import VERSION, part

EVERYTHING = "kvb:"
Progress = Callable[[int, int | None], None]  # done, of how many (None = not known)
_NAME = re.compile(rf"kvb:{VERSION}:([0-9a-f]{{32}}):[0-9a-f]{{40}}(?::(\d+)(:claim)?)?")
_AT_ONCE_BYTES = 32 << 20
_AT_ONCE_NAMES = 500


class StoredName(NamedTuple):
    """A name taken apart. A place (window or tail) has no number; a claim is a write that was announced."""

    tenant: str
    record: str
    number: int | None
    is_claim: bool


def read_name(name: str) -> StoredName | None:
    """What a name says; None where it is none of this version."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    tenant, number, claim = found.groups()
    record = name if number is None else name.removesuffix(":claim").rpartition(":")[0]
    return StoredName(tenant, record, None if number is None else int(number), claim is not None)


@dataclass
class Holding:
    """What one tenant has in the store."""

    tenant: str
    records: int = 0  # with a part 0: the others are not found
    parts: int = 0
    places: int = 0
    bytes: int = 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Report:
    """What reading all that a tenant has in the store showed."""

    tenant: str
    good: int = 0
    tokens: int = 0
    damaged: int = 0
    missing_parts: int = 0  # records of which the store has evicted a part, or a writer died
    writing: int = 0
    places: int = 0
    lost_places: int = 0  # that point to records which are not there, or are none
    deleted: int = 0  # names
    bad_names: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        found = asdict(self)
        found.pop("bad_names")
        return found


def listed(store: ByteStore, prefix: str, progress: Progress) -> dict[str, int]:
    """All names that begin with `prefix`, each once, with the bytes of their values."""
    found: dict[str, int] = {}
    for name, size in store.names(prefix):
        found[name] = size
        if not len(found) % _AT_ONCE_NAMES:
            progress(len(found), None)
    return found


def holdings(names: dict[str, int]) -> list[Holding]:
    """What each tenant has, the largest first."""
    found: dict[str, Holding] = {}
    for name, size in names.items():
        stored = read_name(name)
        if stored is None or stored.is_claim:
            continue
        holding = found.setdefault(stored.tenant, Holding(stored.tenant))
        holding.bytes += size
        holding.places += stored.number is None
        holding.parts += stored.number is not None
        holding.records += stored.number == 0
    return sorted(found.values(), key=lambda each: -each.bytes)


def delete(store: ByteStore, names: Sequence[str], progress: Progress) -> None:
    """Delete names, some at a time."""
    for start in range(0, len(names), _AT_ONCE_NAMES):
        store.delete(names[start : start + _AT_ONCE_NAMES])
        progress(min(start + _AT_ONCE_NAMES, len(names)), len(names))


# --- reading everything ----------------------------------------------------------------------------


@dataclass
class _Records:
    """The names of a tenant, by record."""

    sizes: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    claimed: set[str] = field(default_factory=set)
    places: list[str] = field(default_factory=list)


def check(store: ByteStore, names: dict[str, int], progress: Progress) -> list[Report]:
    """Read every record and place of `names` and verify it; nothing is changed."""
    tenants: dict[str, _Records] = defaultdict(_Records)
    for name, size in names.items():
        stored = read_name(name)
        if stored is None:
            continue
        records = tenants[stored.tenant]
        if stored.is_claim:
            records.claimed.add(stored.record)
        elif stored.number is None:
            records.places.append(name)
        else:
            records.sizes[stored.record][stored.number] = size
    total = sum(len(each.sizes) + len(each.places) for each in tenants.values())
    done, reports = 0, []
    for tenant, records in sorted(tenants.items()):
        report, digests = Report(tenant), set()
        for batch in _batches(records.sizes):
            digests |= _check_records(store, batch, records, report)
            progress(done := done + len(batch), total)
        for start in range(0, len(records.places), _AT_ONCE_NAMES):
            places = records.places[start : start + _AT_ONCE_NAMES]
            _check_places(store, places, digests, report)
            progress(done := done + len(places), total)
        reports.append(report)
    return reports


def _batches(sizes: dict[str, dict[int, int]]) -> Iterator[list[str]]:
    """Records to be read together: not more bytes than some, but at least one."""
    batch: list[str] = []
    room = _AT_ONCE_BYTES
    for record, of_parts in sizes.items():
        size = sum(of_parts.values())
        if batch and (size > room or len(batch) >= _AT_ONCE_NAMES):
            yield batch
            batch, room = [], _AT_ONCE_BYTES
        batch.append(record)
        room -= size
    if batch:
        yield batch


def _check_records(store: ByteStore, batch: Sequence[str], records: _Records, report: Report) -> set[str]:
    """Read these records; returns the digests of the good ones."""
    numbers = {record: sorted(records.sizes[record]) for record in batch}
    wanted = [part(record, number) for record in batch for number in numbers[record]]
    values = dict(zip(wanted, store.read(wanted), strict=True))
    digests = set()
    for record in batch:
        found = {number: values[part(record, number)] for number in numbers[record]}
        reason, digest, tokens = _verdict(found, record)
        if digest:
            report.good += 1
            report.tokens += tokens
            digests.add(digest)
        elif reason == parts.GONE and record in records.claimed:
            report.writing += 1
        else:
            report.missing_parts += reason == parts.GONE
            report.damaged += reason != parts.GONE
            report.bad_names += [part(record, number) for number in numbers[record]]
    return digests


def _verdict(found: dict[int, Any], record: str) -> tuple[str, str, int]:
    """Of the parts of a record: why it cannot be had, or else its digest and tokens."""
    if found.get(0) is None:
        return parts.GONE, "", 0
    start, digest = parts.read_start(found[0], record), parts.key_in(found[0], record)
    if start is None or digest is None:
        return parts.CORRUPT, "", 0
    joined = parts.join([found.get(number) for number in range(start.num_parts)], record, digest)
    if isinstance(joined, str):
        return joined, "", 0
    return "", digest, len(joined.header.token_ids)


def _check_places(store: ByteStore, names: Sequence[str], digests: set[str], report: Report) -> None:
    """Read these windows and tails, and see whether there are records where they point."""
    for name, value in zip(names, store.read(names), strict=True):
        raw = None if value is None else bytes(value)
        place = WindowPlace.from_bytes(raw) or TailPlace.from_bytes(raw)
        report.places += 1
        if place is None or place.digest not in digests:
            report.lost_places += 1
            report.bad_names.append(name)
