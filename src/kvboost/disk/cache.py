"""The disk behind a chunk store: saving beside requests, reading under a deadline.

One thread saves what the store has and the disk does not, and tells the store what went; a few others read.
Nobody who answers a request ever waits for the disk longer than the deadline, and only for chunks that the
prompt needs. Knows the store and what every tier can do (`chunk_tier`), no model.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvboost.disk import serde
from kvboost.disk.chunk_tier import GONE, OTHER_FORM, ChunkTier
from kvboost.errors import CacheFileError
from kvboost.kv.codec import KeptChunk, KVCodec, StoredKV
from kvboost.locks import fork_safe_lock
from kvboost.store.budget import StoredChunk
from kvboost.store.manager import KVCacheManager

_log = logging.getLogger(__name__)
TOO_SLOW = "the disk did not answer in time"
_DEADLINE_S = 2.0  # for all that one request needs
_DRAIN_S = 60.0
_WAY_S = 1.0  # that storing waits for saving
_REST_S = 30.0  # that it does not wait at all after the disk was too slow
_BATCH = 8  # chunks that are synced and entered together
_REFRESH_S = 5.0
_READERS = 4
_MOST_STUCK = 16  # readers that may hang before the disk is given up


@dataclass
class Fetched:
    """What was read from disk, and what could not be, with the reason."""

    loaded: dict[str, StoredKV] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


class DiskCache:
    """Saves the chunks of one family in a tier, and loads them from it."""

    def __init__(self, manager: KVCacheManager, codec: KVCodec, tier: ChunkTier, family: str) -> None:
        """`tier` holds chunks of this family only, and is closed with this."""
        self._manager = manager
        self._codec = codec
        self._family = family
        self.tier = tier
        self._pid = os.getpid()
        self._readers = Readers()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._is_saving = False
        self._was_too_slow = False  # then chunks were forgotten that are still there
        self._no_waiting_until = 0.0
        self._adopt()
        if not self.tier.is_read_only:
            manager.on_disk.save_from_now_on()
        manager.load = lambda chunks: self.fetch(chunks).loaded
        self._saver = threading.Thread(target=self._save_forever, name="kvboost-saver", daemon=True)
        self._saver.start()

    # --- reading -----------------------------------------------------------------------------

    @staticmethod
    def deadline() -> float:
        """Until when a request that starts reading now may wait for the disk, on the monotonic clock."""
        return time.monotonic() + _DEADLINE_S

    def fetch(self, chunks: Iterable[KeptChunk], until: float | None = None) -> Fetched:
        """Read chunks whose KV lies on disk, all of them by `until` (None = the deadline from now)."""
        until = self.deadline() if until is None else until
        wanted = {chunk.chunk_id: chunk for chunk in chunks if not chunk.kv.is_loaded}
        found = Fetched()
        futures: dict[str, Future[StoredKV | str]] = {}
        for key in wanted:
            if key not in self.tier:
                found.failed[key] = GONE
            elif (future := self._readers.submit(partial(self._read, key))) is None:
                found.failed[key] = TOO_SLOW
            else:
                futures[key] = future
        for key, future in futures.items():
            try:
                kv = future.result(max(0.0, until - time.monotonic()))
            except FutureTimeoutError:
                self._readers.give_up(future)
                found.failed[key] = TOO_SLOW
                continue
            except Exception as error:  # out of memory, for one: the prompt can be computed all the same
                found.failed[key] = type(error).__name__
                continue
            if isinstance(kv, str):
                found.failed[key] = kv
            else:
                found.loaded[key] = kv
        self._was_too_slow |= TOO_SLOW in found.failed.values()
        return found

    def _read(self, key: str) -> StoredKV | str:
        chunk = self.tier.load_or_reason(key)
        if isinstance(chunk, str):
            return chunk
        if not chunk.kv.codec.keeps_form_of(self._codec):
            return OTHER_FORM
        return StoredKV(self._codec, self._codec.settled(chunk.kv.tensors), chunk.kv.tokens)

    # --- saving ------------------------------------------------------------------------------

    def wake(self) -> None:
        """There is something to save."""
        self._wake.set()

    def _save_forever(self) -> None:
        next_look = time.monotonic() + _REFRESH_S  # for what other processes have saved
        while True:
            with contextlib.suppress(Exception):  # a saver that dies would lose everything from then on
                self._save_all()
            if self._closing.is_set():
                return
            self._wake.wait(max(0.0, next_look - time.monotonic()))
            self._wake.clear()
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + _REFRESH_S
                with contextlib.suppress(Exception):
                    if self.tier.refresh() or self._was_too_slow:
                        self._was_too_slow = False
                        self._adopt()

    def _save_all(self) -> None:
        self._is_saving = True
        try:
            if used := self._manager.on_disk.take_used():
                self.tier.touch(used)
            while chunks := self._manager.on_disk.take_unsaved(_BATCH, self._family):
                written: Sequence[bool] = [False] * len(chunks)
                try:
                    written = self.tier.write_records([serde.stored_record(stored) for stored in chunks])
                finally:
                    self._manager.on_disk.mark_saved(chunks, written)
                    self._manager.on_disk.lost(self.tier.take_evicted(), GONE)
            if obsolete := self._manager.on_disk.take_obsolete():
                self.tier.remove(obsolete)
        finally:
            self._is_saving = False

    def _adopt(self) -> None:
        """Tell the store what is on disk."""
        found = [header for header in self.tier.headers() if header.is_chunk_of(self._codec)]
        unknown = self._manager.on_disk.note_saved(header.key for header in found)
        new = [
            StoredChunk(header.meta["namespace"], header.meta["content"], header.chunk((), self._codec))
            for header in found
            if header.key in unknown
        ]
        self._manager.on_disk.adopt(new, self._family)

    def make_way(self, tokens: int) -> None:
        """Before `tokens` tokens are stored: give the disk a moment to save what they would evict.

        Never more than a second, and not again for a while once that was not enough.
        """
        has_room = self._manager.has_room(tokens, self._codec.bytes_for(tokens))
        if has_room or time.monotonic() < self._no_waiting_until:
            return
        if not self.flush(_WAY_S):
            self._no_waiting_until = time.monotonic() + _REST_S

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all is saved; False where that took too long."""
        until = time.monotonic() + (_DRAIN_S if timeout_s is None else timeout_s)
        while self._manager.on_disk.num_unsaved or self._is_saving:
            self._wake.set()
            if time.monotonic() >= until or not self._saver.is_alive():
                return False
            time.sleep(0.005)
        return True

    def clear(self) -> None:
        """Forget all that is in the store and not pinned, and all that is on disk; pins are saved again."""
        if os.getpid() != self._pid:  # a forked child leaves the disk to its parent
            self._manager.clear()
            return
        if self.tier.is_read_only and not self._closing.is_set():
            raise CacheFileError(
                f"{self.tier.name} cannot be changed, nothing was cleared: give this process access to it"
            )
        is_idle = self._closing.is_set() or self.flush()
        self._manager.clear()
        if self._closing.is_set():
            return
        if not is_idle:
            raise CacheFileError(f"{self.tier.name} was not cleared: the disk does not answer")
        keys = [header.key for header in self.tier.headers()]
        self.tier.clear()
        self._manager.on_disk.lost(keys, GONE)
        self._manager.on_disk.save_from_now_on()

    def give_up(self) -> None:
        """Take all from the disk, and save nothing any more: what is in the store cannot be trusted."""
        self._manager.on_disk.stop_saving()
        if self._closing.is_set() or os.getpid() != self._pid or self.tier.is_read_only:
            return
        try:
            self.clear()
        except CacheFileError as error:
            _log.warning("%s", error)
        self._manager.on_disk.stop_saving()

    def stats(self) -> dict[str, Any]:
        """Sizes and counters of the disk at this moment."""
        return {**self.tier.stats(), "unsaved_chunks": self._manager.on_disk.num_unsaved}

    def close_unowned(self) -> None:
        """Close it where its engine was collected as garbage: in any thread, the saver's own among them."""
        if threading.current_thread() is threading.main_thread():
            self.close()
        else:  # closing waits for the saver, and nobody else could collect garbage meanwhile
            threading.Thread(target=self.close, name="kvboost-closer", daemon=True).start()

    def close(self) -> None:
        """Save what is left, and close the files."""
        if self._closing.is_set() or os.getpid() != self._pid:  # a forked child leaves them to its parent
            return
        is_saved = self.flush()
        self._closing.set()
        self._wake.set()
        self._saver.join(_DRAIN_S if is_saved else 0.0)
        self._readers.close()
        if not self._saver.is_alive():
            self.tier.close()


class Readers:
    """A few threads that read, so that a request can stop waiting for a disk that hangs.

    One that hangs is left behind, and another takes its place.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._stuck: set[Future[Any]] = set()
        self._started = 0
        self._is_closed = False
        self._pid = os.getpid()
        self._lock = fork_safe_lock()
        for _ in range(_READERS):
            self._start()

    def _start(self) -> None:
        self._started += 1
        threading.Thread(target=self._work, name="kvboost-reader", daemon=True).start()

    def submit(self, call: Callable[[], Any]) -> Future[Any] | None:
        """Have `call` made; None where too many readers hang, or there are none any more."""
        with self._lock:
            self._stuck = {future for future in self._stuck if not future.done()}
            is_forked = os.getpid() != self._pid  # threads stay with the parent
            if self._is_closed or is_forked or len(self._stuck) >= _MOST_STUCK:
                return None
            future: Future[Any] = Future()
            self._queue.put((future, call))
            return future

    def give_up(self, future: Future[Any]) -> None:
        """Wait for it no longer; a reader that is at it may never come back."""
        with self._lock:
            if not future.cancel():
                self._stuck.add(future)
                if self._started < _READERS + _MOST_STUCK:
                    self._start()

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            future, call = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del task, future, call  # or what was read stays in memory until something else is

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for _ in range(self._started):
                self._queue.put(None)
