"""One thread that checks the weights of all watched models over, slice by slice, between requests.

A write that moves no counter and leaves the probed values as they were is seen by nothing else. A pass over
a model takes at most half of its time, so that whatever is written is seen when that time has passed. Knows
nothing of models but how large they are, and that they can be scrubbed.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvboost import locks

if TYPE_CHECKING:
    from kvboost.identity.model_state import ModelWatch

_log = logging.getLogger(__name__)
SLICE_BYTES = 4 << 20
LEAST_RATE = 1 << 30  # bytes per second: of very large models, a pass may take longer than asked for
_LATE_SHARE = 0.5  # of a pass: then it goes on though requests are running
_BUSY_S = 0.01
_LEAST_S = 0.1
_STOOD_STILL_S = 2.5  # the thread looks around more often, unless the whole process was stopped


def stated_seconds(seconds: float, nbytes: int) -> float:
    """Within which time a change is seen, of one that was asked for, for so many bytes."""
    return max(seconds, _LEAST_S, 2 * nbytes / LEAST_RATE)


@dataclass(eq=False)
class _Task:
    watched: weakref.ref[ModelWatch]
    lock: locks.ModelLock
    seconds: dict[int, float]  # what each user asked for
    due: float = 0.0
    started: float = 0.0

    def pass_seconds(self, nbytes: int) -> float:
        return stated_seconds(min(self.seconds.values()), nbytes) / 2


class Scrubber:
    """The thread, which runs while somebody is watched."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tasks: list[_Task] = []
        self._left: deque[int] = deque()  # users that are gone
        self._thread: threading.Thread | None = None
        self._ended = False
        self._seen_at = 0.0  # when the thread looked around last

    def add(self, user: int, watched: ModelWatch, lock: locks.ModelLock, seconds: float) -> None:
        """Scrub `watched` on behalf of `user`, who wants changes seen within `seconds`."""
        with self._changed:
            self._let_go()  # one that is gone may have had the same name
            task = next((each for each in self._tasks if each.watched() is watched), None)
            if task is None:
                now = time.monotonic()
                task = _Task(weakref.ref(watched, self._gone), lock, {}, now, now)
                self._tasks.append(task)
            task.seconds[user] = seconds
            task.due = min(task.due, time.monotonic())
            self._start()
            self._changed.notify_all()

    def ensure_running(self) -> None:
        """Start the thread where it should run and does not: in the child of a fork."""
        if self._thread is None and self._tasks:
            with self._changed:
                self._start()

    def _start(self) -> None:
        if self._thread is None and not self._ended:
            self._thread = threading.Thread(target=self._run, name="kvboost-weights", daemon=True)
            self._thread.start()

    def remove(self, user: int) -> None:
        """Scrub no more on behalf of `user`. It waits for nothing: garbage is collected in any thread."""
        self._left.append(user)
        if self._changed.acquire(blocking=False):
            try:
                self._let_go()
                self._changed.notify_all()
            finally:
                self._changed.release()

    def _let_go(self) -> None:
        """Forget users that have left, with the lock held."""
        while self._left:
            user = self._left.popleft()
            for task in list(self._tasks):
                task.seconds.pop(user, None)
                if not task.seconds:
                    self._tasks.remove(task)

    def end(self) -> None:
        """Stop the thread, when Python ends."""
        with self._changed:
            self._ended = True
            self._tasks.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _gone(self, reference: weakref.ref[ModelWatch]) -> None:
        # Called wherever garbage is collected, so no lock may be taken: the thread finds it by itself.
        for task in list(self._tasks):
            if task.watched is reference:
                task.due = 0.0

    def _run(self) -> None:
        while (task := self._next()) is not None:
            watched = task.watched()
            if watched is None:
                with self._changed:
                    if task in self._tasks:
                        self._tasks.remove(task)
            elif self._may_go(task, watched):
                self._go(task, watched)
            del watched

    def _next(self) -> _Task | None:
        """The task that is due; waits for it. None when there is no more to do."""
        with self._changed:
            while True:
                self._let_go()
                self._forgive(time.monotonic())
                if not self._tasks or self._ended:
                    break
                task = min(self._tasks, key=lambda each: each.due)
                wait = task.due - time.monotonic()
                if wait <= 0:
                    return task
                self._changed.wait(min(wait, 1.0))
            self._thread, self._seen_at = None, 0.0
            return None

    def _forgive(self, now: float) -> None:
        """Time in which the process stood still makes nobody late: nothing was served of its models then."""
        stood_still = now - self._seen_at
        if self._seen_at and stood_still > _STOOD_STILL_S:
            for task in self._tasks:
                task.due += stood_still
                task.started += stood_still
        self._seen_at = now

    def _may_go(self, task: _Task, watched: ModelWatch) -> bool:
        """Between requests, or when it is late."""
        late = time.monotonic() - task.due
        if task.lock.is_busy and late < _LATE_SHARE * task.pass_seconds(watched.nbytes):
            time.sleep(_BUSY_S)
            return False
        return True

    def _go(self, task: _Task, watched: ModelWatch) -> None:
        size = max(1, watched.nbytes)
        seconds = task.pass_seconds(size) * _LATE_SHARE
        try:
            has_ended = watched.scrub(SLICE_BYTES)
        except Exception as error:  # out of memory, or a device that is gone: another pass comes
            _log.warning("weights could not be checked over: %s: %s", type(error).__name__, error)
            has_ended = True
        now = time.monotonic()
        with self._changed:
            if has_ended:
                task.due = max(now, task.started + seconds)
                task.started = task.due
            else:
                task.due += seconds * SLICE_BYTES / size


SCRUBBER = Scrubber()
atexit.register(lambda: SCRUBBER.end())


def _begin_anew() -> None:
    global SCRUBBER  # the thread is not there in the child of a fork
    tasks = SCRUBBER._tasks
    SCRUBBER = Scrubber()
    SCRUBBER._tasks = tasks


locks.undo_in_child(_begin_anew)
