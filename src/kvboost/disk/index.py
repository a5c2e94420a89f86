"""Which chunk lies in which slot: a SQLite database that several processes share.

A slot is claimed before it is written and published afterwards; a claim of a process that died is taken
back by whoever needs a slot next. Without an owner it is opened to be read, and nothing is changed.
Knows keys, slots and bytes, no tensors.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from kvboost.disk.folder import Owner
from kvboost.disk.trust import open_private
from kvboost.locks import fork_safe_rlock

_COLUMNS = "key, slot, CAST(header AS BLOB), rowid"
_MOST = 1 << 62
_BUSY_SECONDS = 10.0
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL)",
    "CREATE TABLE IF NOT EXISTS entries (key TEXT PRIMARY KEY, slot INTEGER NOT NULL UNIQUE, "
    "used INTEGER NOT NULL, header BLOB NOT NULL, parent TEXT NOT NULL)",
    "CREATE INDEX IF NOT EXISTS by_parent ON entries (parent)",
    "CREATE INDEX IF NOT EXISTS by_used ON entries (used)",
    "CREATE TABLE IF NOT EXISTS claims (slot INTEGER PRIMARY KEY, owner TEXT NOT NULL)",
)


class IndexRow(NamedTuple):
    """A chunk's key, its slot, and the header of its record; what a damaged file says may be anything."""

    key: str
    slot: int
    header: bytes
    number: int = -1  # of the row, where it came from the database
    parent: str = ""  # the key of the chunk before it; only written, the header says it too


def _run(connection: sqlite3.Connection, statement: str, values: Sequence[object] = ()) -> sqlite3.Cursor:
    try:
        return connection.execute(statement, values)
    except UnicodeDecodeError as error:  # SQLite quotes damaged bytes in its message
        raise sqlite3.DatabaseError("malformed, and not even in words that can be shown") from error


class DiskIndex:
    """The open database. All methods may raise `sqlite3.Error`, and may be called from any thread."""

    def __init__(self, path: Path, owner: Owner | None) -> None:
        self.path = path
        self._owner = owner  # None: nothing is written
        self._lock = fork_safe_rlock()
        self._is_closed = False
        self._is_frozen = False  # read as it lies, without SQLite's log
        if owner is not None and not path.exists():  # SQLite gives its other files the mode of this one
            os.close(open_private(path, os.O_RDWR | os.O_CREAT | os.O_EXCL))
        self._connection = self._connect()
        try:
            if owner is not None:
                with self.transaction():
                    for statement in _SCHEMA:
                        self._execute(statement)
            self._identity = self._identity_now()
            self._seen_version = -1
        except BaseException:
            self._connection.close()
            raise

    def _connect(self) -> sqlite3.Connection:
        if self._owner is not None:
            return self._connection_to(str(self.path), "PRAGMA journal_mode=WAL", "PRAGMA synchronous=NORMAL")
        # With its log where SQLite can use that, otherwise the file as it lies: rows are checked anyway.
        name, look = f"file:{quote(os.fsencode(self.path))}?mode=ro", "SELECT COUNT(*) FROM meta"
        try:
            return self._connection_to(name, look)
        except sqlite3.OperationalError:
            self._is_frozen = True
            return self._connection_to(f"{name}&immutable=1", look)

    def _connection_to(self, name: str, *first: str) -> sqlite3.Connection:
        """A connection on which the statements `first` went well."""
        connection = sqlite3.connect(
            name,
            timeout=_BUSY_SECONDS,
            isolation_level=None,
            check_same_thread=False,
            uri=self._owner is None,
        )
        connection.text_factory = lambda raw: raw.decode(errors="replace")
        try:
            for statement in first:
                _run(connection, statement)
        except BaseException:
            connection.close()
            raise
        return connection

    def _execute(self, statement: str, values: Sequence[object] = ()) -> sqlite3.Cursor:
        return _run(self._connection, statement, values)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All of it or nothing, alone among all processes."""
        with self._lock:
            try:
                self._execute("BEGIN IMMEDIATE")
                yield
                self._execute("COMMIT")
            except BaseException:
                self._roll_back()
                raise

    def _roll_back(self) -> None:
        """End a transaction that failed, if need be with its connection: it would block all others.

        There is no new connection: whoever opens the folder again looks at it first.
        """
        try:
            if self._connection.in_transaction:
                self._execute("ROLLBACK")
        except sqlite3.Error:
            self.close()

    @property
    def is_read_only(self) -> bool:
        return self._owner is None

    # --- what is there -----------------------------------------------------------------------

    def meta(self) -> dict[str, int]:
        """The numbers that describe the folder, as far as they are any."""
        with self._lock:
            found = self._execute("SELECT name, value FROM meta").fetchall()
        return {name: value for name, value in found if isinstance(value, int) and 0 <= value < _MOST}

    def set_meta(self, **values: int) -> None:
        for name, value in values.items():
            self._execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

    def num_slots(self) -> int:
        """How many slots there are."""
        return self.meta().get("num_slots", 0)

    def rows(self) -> list[IndexRow]:
        """All entries, those used last at the end."""
        with self._lock:
            found = self._execute(f"SELECT {_COLUMNS} FROM entries ORDER BY used").fetchall()
        return [IndexRow(*row) for row in found]

    def row(self, key: str) -> IndexRow | None:
        with self._lock:
            found = self._execute(f"SELECT {_COLUMNS} FROM entries WHERE key = ?", (key,)).fetchone()
        return IndexRow(*found) if found is not None else None

    def has_changed(self) -> bool:
        """Whether another process changed something since this was asked last."""
        with self._lock:
            version = int(self._execute("PRAGMA data_version").fetchone()[0])
            changed, self._seen_version = version != self._seen_version, version
            return changed

    def was_replaced(self) -> bool:
        """Whether it is to be opened again: it is closed, or another database has taken its place.

        Also where SQLite cannot see what changed in it.
        """
        try:
            return self._is_closed or self._identity_now() != self._identity
        except OSError:
            return True

    def _identity_now(self) -> tuple[int, ...]:
        found = os.lstat(self.path)
        if not self._is_frozen:
            return (found.st_ino,)
        log: tuple[int, ...] = ()  # of a process that writes by now: with it, it can be followed
        with contextlib.suppress(FileNotFoundError):
            seen = os.lstat(f"{self.path}-wal")
            log = (seen.st_ino, seen.st_mtime_ns, seen.st_size)
        return (found.st_ino, found.st_mtime_ns, found.st_size, *log)

    def counts(self) -> tuple[int, int]:
        """Entries, and slots that are being written."""
        with self._lock:
            entries = self._execute("SELECT COUNT(*) FROM entries").fetchone()[0]
            claims = self._execute("SELECT COUNT(*) FROM claims").fetchone()[0]
        return int(entries), int(claims)

    def problems(self) -> list[str]:
        """What is wrong with the file, by SQLite's own check and by what should be in it."""
        with self._lock:
            found = [str(row[0]) for row in self._execute("PRAGMA integrity_check(8)").fetchall()]
            tables = self._execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
        if found != ["ok"]:
            return found
        expected = {statement.replace("IF NOT EXISTS ", "") for statement in _SCHEMA}
        return [] if {row[0] for row in tables} == expected else ["its tables are not what they should be"]

    # --- changing it -------------------------------------------------------------------------

    def claim(self, keys: Sequence[str], parents: Iterable[str] = ()) -> tuple[dict[str, int], list[str]]:
        """Slots for those of `keys` that have none, as far as there is room; and the keys evicted for them.

        A process claims once at a time: claims that it still has are from a write that failed.

        What was used longest ago goes first, but nothing that another entry follows; of what was written
        together, the last.
        """
        owner = self._writer()
        with self.transaction():
            slots = self.num_slots()
            self._drop_dead_claims(owner)
            used = {row[0] for row in self._execute("SELECT slot FROM entries UNION SELECT slot FROM claims")}
            known = {key for key in keys if self.row(key) is not None}
            wanted = [key for key in dict.fromkeys(keys) if key not in known]
            free = list(itertools.islice((slot for slot in range(slots) if slot not in used), len(wanted)))
            evicted: list[str] = []
            spared = {*known, *parents}
            while len(free) < len(wanted) and (victim := self._victim(spared)) is not None:
                key, slot, number = victim
                evicted.append(key)
                self._execute("DELETE FROM entries WHERE rowid = ?", (number,))
                if isinstance(slot, int) and 0 <= slot < slots:
                    free.append(slot)
            claimed = dict(zip(wanted, free, strict=False))
            for slot in claimed.values():
                self._execute("INSERT INTO claims VALUES (?, ?)", (slot, owner.name))
            return claimed, evicted

    def _victim(self, spared: set[str]) -> tuple[str, int, int] | None:
        """Key, slot and row of the entry that goes next."""
        leaves = "WHERE NOT EXISTS (SELECT 1 FROM entries AS next WHERE next.parent = entries.key)"
        for condition in (leaves, ""):  # a damaged file may hold a circle
            found = self._execute(
                f"SELECT key, slot, rowid FROM entries {condition} ORDER BY used, rowid DESC"
            )
            for key, slot, number in found:
                if key not in spared:
                    return key, slot, number
        return None

    def publish(self, rows: Iterable[IndexRow]) -> list[IndexRow]:
        """Turn claims whose slots are written into entries; returns those that still were claimed."""
        owner = self._writer()
        entered = []
        with self.transaction():
            clock, slots = self._tick(), self.num_slots()
            for row in rows:
                taken = self._execute(
                    "DELETE FROM claims WHERE slot = ? AND owner = ?", (row.slot, owner.name)
                )
                if taken.rowcount == 1 and row.slot < slots:
                    self._enter(row, clock)
                    entered.append(row)
        return entered

    def is_complete(self) -> bool:
        """Whether all that the slots held when this index was made has been entered."""
        return self.meta().get("complete", 0) == 1

    def complete(self, rows: Iterable[IndexRow]) -> None:
        """Enter what the slots of a new index hold, and that this is all of it."""
        with self.transaction():
            clock, slots = self._tick(), self.num_slots()
            for row in rows:
                if row.slot < slots:
                    self._enter(row, clock)
            self.set_meta(complete=1)

    def _enter(self, row: IndexRow, clock: int) -> None:
        self._execute(
            "INSERT OR IGNORE INTO entries VALUES (?, ?, ?, ?, ?)",
            (row.key, row.slot, clock, row.header, row.parent),
        )

    def give_up(self, slots: Iterable[int]) -> None:
        """Take claims back whose slots were not written."""
        owner = self._writer()
        with self.transaction():
            for slot in slots:
                self._execute("DELETE FROM claims WHERE slot = ? AND owner = ?", (slot, owner.name))

    def touch(self, keys: Iterable[str]) -> None:
        """Count entries as used now."""
        if self.is_read_only:
            return
        with self.transaction():
            clock = self._tick()
            for key in keys:
                self._execute("UPDATE entries SET used = ? WHERE key = ?", (clock, key))

    def remove(self, keys: Iterable[str]) -> None:
        """Drop entries."""
        if self.is_read_only:
            return
        with self.transaction():
            for key in keys:
                self._execute("DELETE FROM entries WHERE key = ?", (key,))

    def remove_rows(self, rows: Iterable[IndexRow]) -> None:
        """Drop rows as they were read, unless they have changed since."""
        if self.is_read_only:
            return
        with self.transaction():
            for row in rows:
                self._execute(
                    "DELETE FROM entries WHERE rowid = ? AND slot IS ? AND CAST(header AS BLOB) IS ?",
                    (row.number, row.slot, row.header),
                )

    def clear(self) -> None:
        """Drop all entries, and all slots but those up to the last that another process is writing to."""
        owner = self._writer()
        with self.transaction():
            self._drop_dead_claims(owner)
            last = self._execute("SELECT MAX(slot) FROM claims").fetchone()[0]
            self._execute("DELETE FROM entries")
            self.set_slots(0 if last is None else min(int(last) + 1, self.num_slots()))

    def set_slots(self, num_slots: int, entries_below: int | None = None) -> None:
        """Use so many slots from now on; entries beyond them, or beyond `entries_below`, are dropped.

        Only inside a transaction.
        """
        most = num_slots if entries_below is None else entries_below
        self._execute("DELETE FROM entries WHERE slot >= ? OR slot < 0", (most,))
        self.set_meta(num_slots=num_slots)

    def _tick(self) -> int:
        clock = self.meta().get("clock", 0) + 1
        self.set_meta(clock=clock)
        return clock

    def _writer(self) -> Owner:
        if self._owner is None:
            raise sqlite3.OperationalError("attempt to write a readonly database")
        return self._owner

    def _drop_dead_claims(self, me: Owner) -> None:
        alive: dict[str, bool] = {me.name: False}  # its own are left from a write that failed
        for slot, owner in self._execute("SELECT slot, owner FROM claims").fetchall():
            if owner not in alive:
                alive[owner] = me.is_alive(owner)
            if not alive[owner]:
                self._execute("DELETE FROM claims WHERE slot IS ?", (slot,))

    def close(self) -> None:
        """Close it; afterwards all methods raise `sqlite3.Error`."""
        with self._lock, contextlib.suppress(sqlite3.Error):
            self._is_closed = True
            self._connection.close()
