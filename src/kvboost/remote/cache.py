"""The shared store behind RAM and disk: what other machines have read is fetched before a prompt is planned.

`look_ahead` asks for what is not known here, in one round trip, reads the records that pay within a deadline,
and puts them into the chunk store; from then on they are like chunks that were computed here. Absence,
lateness and damage are misses with a counted reason. Knows the chunk store and names, no model.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kvboost.disk.cache import Readers
from kvboost.identity.namespace import Namespace
from kvboost.kv.codec import KeptChunk, KVCodec
from kvboost.locks import fork_safe_lock
from kvboost.remote import belief, parts
from kvboost.remote.breaker import Breaker
from kvboost.remote.byte_store import DENIED, TIMEOUT, UNREACHABLE, ByteStore, StoreError
from kvboost.remote.keys import RemoteKeys, part
from kvboost.remote.lookup import MIN_TOKENS, PEEK_BYTES, Found, Question, Wanted, chain_digests
from kvboost.remote.writer import RemoteWriter
from kvboost.store.manager import KVCacheManager

_SHARE = 0.5  # of the prefill that it may save, a request waits at most so long
_LEAST_S, _MOST_S = 0.1, 10.0
_AHEAD = 6  # records that are being read or wait to be stored
_DRAIN_S = 30.0
NOT_THERE = "never stored"
TOO_SLOW = "too slow to pay"
NO_ROOM = "no room"


@dataclass(frozen=True)
class Seen:
    """What a look-up without reading found: text up to `end` exactly, of so many bytes, in about `ms`."""

    end: int = 0
    ms: float = 0.0
    moved_tokens: int = 0
    starts: tuple[int, ...] = ()  # of the chunks up to `end`


class RemoteCache:
    """A shared store for one engine.

    `cuts` says where a text is cut into chunks; `prefill_s` how long computing `n` tokens takes, about.
    """

    def __init__(
        self,
        store: ByteStore,
        manager: KVCacheManager,
        codec: KVCodec,
        *,
        cuts: Callable[[np.ndarray], list[int]],
        prefill_s: Callable[[int], float],
        writes: str = "all",
    ) -> None:
        self.store = store
        self._manager = manager
        self._codec = codec
        self._cuts = cuts
        self._prefill_s = prefill_s
        self._writes_all = writes == "all"
        self._pid = os.getpid()
        self._lock = fork_safe_lock()
        self._counts: Counter[str] = Counter()
        self._misses: Counter[str] = Counter()
        self._skipped: Counter[str] = Counter()
        self._is_closed = False
        self.breaker = Breaker()
        self._readers = Readers()
        self._form = codec.form
        self.writer = RemoteWriter(store, manager, self.breaker, self._form)

    # --- reading -----------------------------------------------------------------------------

    def look_ahead(self, ids: np.ndarray, namespace: Namespace, limit: int, anywhere: bool) -> None:
        """Fetch what the shared store has of `ids` `[tokens]` and this process does not.

        Of the first `limit` tokens; with `anywhere`, also text that stands elsewhere in what was stored.
        Returns after a share of the time that computing them would take at the latest.
        """
        asked = self._ask(ids, namespace, limit, anywhere)
        if asked is None:
            return
        found, until = asked
        wanted = self._affordable(found, until)
        started = time.monotonic()
        read = self._fetch(wanted, namespace, until, len(found.exact))
        if read:
            self.breaker.measured_read(read, time.monotonic() - started)

    def look(self, ids: np.ndarray, namespace: Namespace, limit: int, anywhere: bool) -> Seen:
        """What `look_ahead` would fetch, without fetching it."""
        asked = self._ask(ids, namespace, limit, anywhere)
        if asked is None:
            return Seen()
        found, until = asked
        wanted = self._affordable(found, until)
        there = set(found.exact)
        exact = [each for each in wanted if each in there]
        size = sum(self._size(each) for each in exact)
        ms = 1e3 * (2 * self.breaker.trip_s + size / self.breaker.bytes_per_s)
        moved = sum(min(each.end, limit) - max(each.start, 0) for each in wanted if each not in there)
        starts = tuple(each.start for each in exact)
        return Seen(min(exact[-1].end, limit) if exact else 0, ms, moved, starts)

    def _ask(
        self, ids: np.ndarray, namespace: Namespace, limit: int, anywhere: bool
    ) -> tuple[Found, float] | None:
        """What the store has, and until when it may be waited for; None where it is not asked."""
        if self._is_closed or namespace.gated or os.getpid() != self._pid:
            return None
        here = self._manager.match_prefix(ids, namespace).length
        if limit - here < MIN_TOKENS:
            return None
        deadline = min(max(_SHARE * self._prefill_s(limit - here), _LEAST_S), _MOST_S)
        if self.breaker.is_open or 2 * self.breaker.trip_s > deadline:
            self._count(self._skipped, self.breaker.reason or TOO_SLOW)
            self.breaker.was_too_slow()
            return None
        until = time.monotonic() + deadline
        cuts = self._cuts(ids)
        digests = chain_digests(ids, cuts, namespace.key)
        known = self._manager.shared.known_chain(digests, namespace)
        keys = RemoteKeys.of(namespace, self._form)
        every = self.store.sample_every if anywhere else None
        question = Question(keys, ids, cuts, digests, namespace.key, known, limit, every)
        started = time.monotonic()
        values = self._within(partial(self.store.peek, question.names, PEEK_BYTES), until)
        self.breaker.measured_trip(time.monotonic() - started)  # too late is slow, too
        if values is None:
            return None
        found = question.answered(values)
        there = {wanted.digest for wanted in found.exact}
        self.writer.note_gone(digest for digest in digests[known:] if digest not in there)
        with self._lock:
            self._counts["lookups"] += 1
            if not found.exact and not found.moved:
                self._misses[NOT_THERE] += 1
        return found, until

    def _within(self, call: Callable[[], Any], until: float) -> Any:
        """What `call` gives by `until`; None, counted, where it fails or takes longer."""
        future = self._readers.submit(call)
        return self._result(future, until) if future is not None else self._missed(UNREACHABLE)

    def _result(self, future: Future[Any], until: float) -> Any:
        try:
            value = future.result(max(0.0, until - time.monotonic()))
        except FutureTimeoutError:
            self._readers.give_up(future)
            self.breaker.failed(TIMEOUT)
            return self._missed(TIMEOUT)
        except StoreError as error:
            self.breaker.failed(error.reason, at_once=error.reason in (DENIED, UNREACHABLE))
            return self._missed(error.reason)
        except Exception as error:  # out of memory, for one: the prompt can be computed all the same
            return self._missed(type(error).__name__)
        self.breaker.succeeded()
        return value

    def _missed(self, reason: str) -> None:
        self._count(self._misses, reason)

    def _count(self, counter: Counter[str], reason: str, number: int = 1) -> None:
        with self._lock:
            counter[reason] += number

    def _size(self, wanted: Wanted) -> int:
        """About how many bytes are read; what a peer says is believed as far as it can be true."""
        most = belief.most_bytes(wanted.tokens, self._codec)
        return min(wanted.record_bytes, most) or min(self._codec.bytes_for(wanted.tokens), most)

    def _affordable(self, found: Found, until: float) -> list[Wanted]:
        """As many of the records as can be read in time, as things go, and kept."""
        room = (until - time.monotonic()) * self.breaker.bytes_per_s
        wanted: list[Wanted] = []
        for each in [*found.exact, *found.moved]:
            if not self._manager.shared.may_hold(self._codec.bytes_for(each.tokens)):
                self._count(self._misses, NO_ROOM)
                break
            room -= self._size(each)
            if room < 0 and wanted:  # one at least: else nothing would be measured any more
                self._count(self._skipped, TOO_SLOW)
                break
            wanted.append(each)
        return wanted

    def _fetch(self, wanted: Sequence[Wanted], namespace: Namespace, until: float, num_exact: int) -> int:
        """Read records and put them into the chunk store, in order; returns the bytes read.

        The first `num_exact` follow each other: without one of them, those behind it are of no use.
        """
        started, keys = time.monotonic(), RemoteKeys.of(namespace, self._form)
        exact = {each.digest for each in wanted[:num_exact]}
        waiting = deque(wanted)
        running: deque[tuple[Wanted, Future[Any]]] = deque()
        places: dict[str, str] = {}  # by the digest of a chunk: its key here
        read = 0
        while waiting or running:
            while waiting and len(running) < _AHEAD:
                each = waiting.popleft()
                future = self._readers.submit(partial(self._read, each, keys.record(each.digest)))
                if future is None:
                    return read
                running.append((each, future))
            each, future = running.popleft()
            chunk = self._result(future, until)
            if isinstance(chunk, str):
                self._forget(each, keys, chunk)
                if each.digest in exact:
                    rest = [one for one in wanted[wanted.index(each) + 1 :] if one.digest in exact]
                    self._readers.submit(partial(self._check_over, rest, keys))
                    waiting = deque(one for one in waiting if one.digest not in exact)
                    running = deque(one for one in running if one[0].digest not in exact)
                continue
            if chunk is not None:
                read += chunk.kv.nbytes
                ms = 1e3 * (time.monotonic() - started)
            if chunk is None or not self._take_in(chunk, each, namespace, places, ms):
                for _, unwanted in running:
                    unwanted.cancel()
                break
        return read

    def _take_in(
        self, chunk: KeptChunk, wanted: Wanted, namespace: Namespace, places: dict[str, str], ms: float
    ) -> bool:
        """Put a chunk into the chunk store; False where it has no room."""
        self.writer.note_there(wanted.digest)
        key = self._manager.shared.take_in(chunk, namespace, places.get(chunk.parent_hash), fetched_ms=ms)
        if key is None:
            self._count(self._misses, NO_ROOM)
            return False
        places[wanted.digest] = key
        with self._lock:
            self._counts["read_chunks"] += 1
            self._counts["read_bytes"] += chunk.kv.nbytes
            self._counts["read_tokens"] += chunk.length
        return True

    def _read(self, wanted: Wanted, name: str) -> KeptChunk | str:
        """A record, read and verified; the reason where it cannot be had."""
        most = belief.most_bytes(wanted.tokens, self._codec)
        if not most or wanted.record_bytes > most:
            return parts.CORRUPT
        count = parts.count_for(self._size(wanted))
        values = self.store.read([part(name, number) for number in range(count)])
        start = parts.read_start(values[0], name)
        if start is not None and start.num_parts > parts.count_for(most):
            return parts.CORRUPT
        if start is not None and start.num_parts > count:
            values += self.store.read([part(name, number) for number in range(count, start.num_parts)])
        joined = parts.join(values[: start.num_parts] if start is not None else values, name, wanted.digest)
        return joined if isinstance(joined, str) else belief.chunk_in(joined, self._codec, wanted.tokens)

    def _check_over(self, records: Sequence[Wanted], keys: RemoteKeys) -> None:
        """Read the records behind a damaged one, while nobody waits: damaged ones must be written again."""
        for each in records:
            if isinstance(reason := self._read(each, keys.record(each.digest)), str):
                self._forget(each, keys, reason)

    def _forget(self, wanted: Wanted, keys: RemoteKeys, reason: str) -> None:
        """A record that is damaged or not whole is deleted: it is written again by whoever computes it."""
        self._count(self._misses, reason)
        self.writer.note_gone([wanted.digest])
        name = keys.record(wanted.digest)
        count = parts.count_for(belief.most_bytes(wanted.tokens, self._codec))
        self._readers.submit(partial(self.store.delete, [part(name, number) for number in range(count)]))

    # --- writing -----------------------------------------------------------------------------

    def offer(self, stored: Sequence[str], reused: Sequence[str], namespace: Namespace) -> None:
        """Chunks that were stored just now, and chunks that a request has reused."""
        if not self._is_closed and os.getpid() == self._pid:
            self.writer.offer(stored if self._writes_all else reused, namespace)

    def flush(self, timeout_s: float = _DRAIN_S) -> bool:
        """Wait until all that was offered is written; False where that took too long."""
        return self.writer.flush(timeout_s)

    def give_up(self) -> None:
        """Write nothing any more, and take back what was written: it cannot be trusted."""
        if os.getpid() == self._pid and not self._is_closed:
            self.writer.give_up()

    def stats(self) -> dict[str, Any]:
        """Counters and state at this moment."""
        with self._lock:
            counts = {
                name: self._counts[name] for name in ("lookups", "read_chunks", "read_tokens", "read_bytes")
            }
            misses, skipped = dict(self._misses), dict(self._skipped)
        return {
            "address": self.store.name,
            "state": self.breaker.reason or "up",
            "round_trips": self.store.num_trips,
            "trip_ms": round(1e3 * self.breaker.trip_s, 3),
            "read_bytes_per_second": round(self.breaker.bytes_per_s),
            **counts,
            "misses": misses,
            "skipped": skipped,
            "outages": self.breaker.num_opened,
            **self.writer.stats(),
        }

    def close_unowned(self) -> None:
        """Close it where its engine was collected as garbage: in any thread, the writer's own among them."""
        if threading.current_thread() is threading.main_thread():
            self.close()
        else:  # closing waits for the writer, and nobody else could collect garbage meanwhile
            threading.Thread(target=self.close, name="kvboost-closer", daemon=True).start()

    def close(self) -> None:
        """Write what is left, within bounds, and close the connections. It can be called twice."""
        if self._is_closed or os.getpid() != self._pid:
            return
        self._is_closed = True
        self.writer.close(_DRAIN_S)
        self._readers.close()
        self.store.close()
