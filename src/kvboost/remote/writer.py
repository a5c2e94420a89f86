"""Writing to a shared store, beside the requests: one thread takes what is new, and drops what cannot go.

Nothing waits for it and it keeps no tensors: what it is to write are keys, and a chunk that has gone from RAM
meanwhile is not written. Records that another machine has written are not written again. The same thread
tries a store that was down. Knows the chunk store and names, no requests.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvboost.disk import serde
from kvboost.identity.namespace import Namespace
from kvboost.locks import fork_safe_lock
from kvboost.remote import fingerprints, parts
from kvboost.remote.breaker import Breaker
from kvboost.remote.byte_store import DENIED, FULL, ByteStore, StoreError
from kvboost.remote.fingerprints import TailPlace, WindowPlace
from kvboost.remote.keys import RemoteKeys, part
from kvboost.store.manager import KVCacheManager
from kvboost.store.shared_ledger import HeldChunk

_MOST_PENDING = 4_096
_MOST_REMEMBERED = 65_536
_BATCH = 8
_TAKEN_BACK_AT_ONCE = 256
_IDLE_S = 1.0
_REST_S = 10.0  # after the store said that it is full
_MIN_TAIL = 16  # tokens: a shorter chunk is computed sooner than it is read


class _Values(NamedTuple):
    """What is written for a chunk."""

    parts: list[tuple[str, list[bytes]]]
    places: list[tuple[str, list[bytes]]]


@dataclass(frozen=True)
class Written:
    """A record that this process has written."""

    name: str
    parts: int


class RemoteWriter:
    """Writes the exact chunks that it is offered."""

    def __init__(self, store: ByteStore, manager: KVCacheManager, breaker: Breaker, form: str) -> None:
        self._store = store
        self._manager = manager
        self._breaker = breaker
        self._form = form
        self._lock = fork_safe_lock()
        self._pid = os.getpid()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._is_busy = False
        self._pending: OrderedDict[str, Namespace] = OrderedDict()
        self._known: OrderedDict[str, None] = OrderedDict()  # digests that the store has
        self._written: deque[Written] = deque(maxlen=_MOST_REMEMBERED)
        self._rest_until = 0.0
        self._is_on = True
        self._counts: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="kvboost-remote", daemon=True)
        self._thread.start()

    def offer(self, keys: Sequence[str], namespace: Namespace) -> None:
        """Write these chunks of a namespace soon, if they are still there then."""
        with self._lock:
            for key in keys:
                if not self._is_on or key in self._known or key in self._pending:
                    continue
                if len(self._pending) >= _MOST_PENDING:
                    self._dropped["queue full"] += 1
                    continue
                self._pending[key] = namespace
        self._wake.set()

    def note_there(self, digest: str) -> None:
        """The store has this one: it was read just now."""
        with self._lock:
            self._note(digest)

    def note_gone(self, digests: Iterable[str]) -> None:
        """The store has them no longer: they are written again when they are computed again."""
        with self._lock:
            for digest in digests:
                self._known.pop(digest, None)

    def _note(self, digest: str) -> None:
        self._known[digest] = None
        if len(self._known) > _MOST_REMEMBERED:
            self._known.popitem(last=False)

    # --- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing.is_set():
            self._wake.wait(_IDLE_S)
            self._wake.clear()
            try:
                if self._breaker.is_trial_due:
                    self._try_again()
                while not self._breaker.is_open and self._write_some():
                    pass
                if not self._breaker.is_open:
                    self._take_back()
            except StoreError as error:
                self._failed(error)
            except Exception as error:  # a writer that dies would write nothing from then on
                with self._lock:
                    self._dropped[type(error).__name__] += 1

    def _try_again(self) -> None:
        started = time.monotonic()
        self._store.ping()
        self._breaker.tried(time.monotonic() - started)

    def _failed(self, error: StoreError) -> None:
        if error.reason == FULL:
            self._rest_until = time.monotonic() + _REST_S
        else:
            self._breaker.failed(error.reason, at_once=error.reason == DENIED)

    def _write_some(self) -> bool:
        """Write a few; False where there is nothing to write."""
        if time.monotonic() < self._rest_until:
            with self._lock:
                self._dropped[FULL] += len(self._pending)
                self._pending.clear()
            return False
        with self._lock:
            taken = [self._pending.popitem(last=False) for _ in range(min(_BATCH, len(self._pending)))]
            self._is_busy = bool(taken)
        if not taken:
            return False
        try:
            self._write(dict(taken))
        except StoreError as error:
            with self._lock:
                self._dropped[error.reason] += len(taken)
            raise
        finally:
            self._is_busy = False
        return True

    def _write(self, taken: dict[str, Namespace]) -> None:
        """Write these chunks. While the store is waited for, none is held: RAM must be able to let it go."""
        with self._manager.shared.held_exact(taken, 0) as held:
            lengths = {each.chunk.chunk_id: each.chunk.length for each in held}
            del held
        worth = [key for key, length in lengths.items() if length >= _MIN_TAIL]
        with self._lock:
            self._dropped["evicted before"] += len(taken) - len(lengths)
            self._dropped["too short"] += len(lengths) - len(worth)
        named = [RemoteKeys.of(taken[key], self._form) for key in worth]
        names = [keys.record(key) for key, keys in zip(worth, named, strict=True)]
        ours = self._store.claim([part(name, 0) for name in names])
        for key, keys, name, is_ours in zip(worth, named, names, ours, strict=True):
            if not self._is_on:
                return
            values = self._values(key, taken[key], keys, name) if is_ours else None
            if values is not None:
                self._write_record(values, name)
            with self._lock:
                if is_ours and values is None:
                    self._dropped["evicted before"] += 1
                    continue
                self._counts["written_chunks" if is_ours else "duplicate_chunks"] += 1
                self._note(key)

    def _values(self, key: str, namespace: Namespace, keys: RemoteKeys, name: str) -> _Values | None:
        """A record as bytes of its own, and its places; None where it has left RAM."""
        context = fingerprints.context_tokens(self._store.sample_every)
        with self._manager.shared.held_exact({key: namespace}, context) as held:
            for each in held:
                pieces = parts.split(serde.stored_record(each.stored), name)
                copies = [b"".join(piece) for piece in pieces]
                found = [(part(name, number), [copy]) for number, copy in enumerate(copies)]
                return _Values(found, self._places(each, keys))
        return None

    def _write_record(self, values: _Values, name: str) -> None:
        self._written.append(Written(name, len(values.parts)))
        self._store.write([*values.parts[1:], values.parts[0]])  # what is found is whole
        self._breaker.succeeded()
        self._store.write(values.places)
        with self._lock:
            self._counts["written_bytes"] += sum(len(each) for _, (each,) in values.parts)

    def _take_back(self) -> None:
        """Delete what was written, once it cannot be trusted; what fails is tried again later."""
        while not self._is_on and self._written:
            some = list(itertools.islice(self._written, _TAKEN_BACK_AT_ONCE))
            self._store.delete([part(each.name, n) for each in some for n in range(each.parts)])
            for _ in some:
                self._written.popleft()

    def _places(self, held: HeldChunk, keys: RemoteKeys) -> list[tuple[str, list[bytes]]]:
        """By which windows the chunk is found, and behind which chunk."""
        digest, parent = held.chunk.chunk_id, held.chunk.parent_hash
        tail = TailPlace.of(digest, held.ids).to_bytes()
        found = [(keys.tail(parent), [tail])]
        every = self._store.sample_every
        last = fingerprints.last_sample(held.before, every)
        known = [(offset, value) for offset, value in last if offset >= -held.parent_tokens]
        for offset, value in [*known, *fingerprints.samples_known_with(held.before, held.ids, every)]:
            raw = WindowPlace(digest, parent, offset, len(held.ids), held.parent_tokens).to_bytes()
            if WindowPlace.from_bytes(raw) is not None:  # else it ends before the parent
                found.append((keys.window(value), [raw]))
        return found

    # --- the rest ----------------------------------------------------------------------------

    def flush(self, timeout_s: float) -> bool:
        """Wait until all is written or dropped, or taken back; False where that took too long."""
        until = time.monotonic() + timeout_s
        while self._pending or self._is_busy or (self._written and not self._is_on):
            self._wake.set()
            if time.monotonic() >= until or not self._thread.is_alive() or self._breaker.is_open:
                return False
            time.sleep(0.005)
        return True

    def give_up(self) -> None:
        """Write nothing any more, and have what was written taken back: it cannot be trusted.

        The thread does that: behind what it is writing at this moment, and when a store that is down is back.
        """
        with self._lock:
            self._is_on = False
            self._pending.clear()
        self._wake.set()

    def stats(self) -> dict[str, Any]:
        with self._lock:
            dropped = {reason: count for reason, count in self._dropped.items() if count}
            names = ("written_chunks", "written_bytes", "duplicate_chunks")
            counts = {name: self._counts[name] for name in names}
            return {**counts, "pending_chunks": len(self._pending), "dropped": dropped}

    def close(self, timeout_s: float) -> None:
        """Write what is left, and end the thread."""
        if os.getpid() != self._pid:
            return
        self.flush(timeout_s)
        self._closing.set()
        self._wake.set()
        self._thread.join(1.0)
