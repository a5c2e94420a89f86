"""Whether a shared store is asked at all: not while it is down, nor where that takes longer than it saves.

After a few failures in a row nobody asks it any more; a thread beside the requests tries, and when that works
requests ask again. So a request never waits for a store that is known to be down. Knows times and failures.
"""

from __future__ import annotations

import time

from kvboost.locks import fork_safe_lock

_FAILURES = 2
_TRIAL_S = 1.0
_WEIGHT = 0.3  # of a new measurement
_FIRST_TRIP_S = 0.002
_FIRST_RATE = 300e6


class Breaker:
    """Open (nobody asks) after some failures, closed again when a trial succeeds."""

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._failures = 0
        self._next_trial = 0.0
        self._is_slow = False  # somebody did not ask, since it would have taken too long
        self.trip_s = _FIRST_TRIP_S  # of a look-up
        self.bytes_per_s = _FIRST_RATE  # of reading
        self.reason = ""  # why it is open
        self.num_opened = 0

    @property
    def is_open(self) -> bool:
        return bool(self.reason)

    @property
    def is_trial_due(self) -> bool:
        """Half-open: one question, of nobody who waits. One that was slow is tried as one that was down."""
        return (self.is_open or self._is_slow) and time.monotonic() >= self._next_trial

    def succeeded(self) -> None:
        with self._lock:
            self._failures = 0
            self.reason = ""

    def was_too_slow(self) -> None:
        """It was not asked, since that takes too long; whether it still does, a trial must tell."""
        with self._lock:
            self._is_slow = True

    def tried(self, seconds: float) -> None:
        """A trial succeeded and took so long. Look-ups may take longer: it is believed by and by."""
        with self._lock:
            self._failures = 0
            self.reason = ""
            self._is_slow = False
            self._next_trial = time.monotonic() + _TRIAL_S
            self.trip_s = max(seconds, self.trip_s / 4)

    def failed(self, reason: str, *, at_once: bool = False) -> None:
        """Count a failure. With `at_once`, one is enough: the next would be the same."""
        with self._lock:
            self._failures += 1
            self._next_trial = time.monotonic() + _TRIAL_S
            if self._failures >= _FAILURES or at_once or self.reason:
                self.num_opened += not self.reason
                self.reason = reason

    def measured_trip(self, seconds: float) -> None:
        with self._lock:
            self.trip_s += _WEIGHT * (seconds - self.trip_s)

    def measured_read(self, num_bytes: int, seconds: float) -> None:
        with self._lock:
            self.bytes_per_s += _WEIGHT * (num_bytes / max(seconds, 1e-6) - self.bytes_per_s)
