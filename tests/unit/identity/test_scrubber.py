"""The thread that checks weights over: when it is late, and when time does not count."""

from __future__ import annotations

import weakref
from typing import Any

from kvboost.identity.scrubber import Scrubber, _Task


class Watched:
    nbytes = 1 << 20


def task(due: float) -> tuple[Scrubber, _Task, Any]:
    scrubber, watched, lock = Scrubber(), Watched(), object()
    found = _Task(weakref.ref(watched), lock, {1: 60.0}, due, due)  # type: ignore[arg-type]
    scrubber._tasks.append(found)
    return scrubber, found, watched


def test_time_in_which_the_process_stood_still_makes_nobody_late() -> None:
    scrubber, found, _watched = task(due=100.0)
    scrubber._forgive(100.0)
    assert (found.due, found.started) == (100.0, 100.0)
    scrubber._forgive(101.0)  # it waits up to a second
    assert found.due == 100.0
    scrubber._forgive(141.0)
    assert (found.due, found.started) == (140.0, 140.0)
    scrubber._forgive(141.5)
    assert found.due == 140.0
