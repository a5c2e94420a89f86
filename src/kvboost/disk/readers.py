"""Threads that read from disk, so that a request can stop waiting for a disk that hangs.

Knows calls only: no chunks and no files.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from kvboost.locks import fork_safe_lock

_READERS = 4
_MOST_STUCK = 16  # readers that may hang before the disk is given up


class Readers:
    """A few threads that read. One that hangs is left behind, and another takes its place."""

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

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for _ in range(self._started):
                self._queue.put(None)
