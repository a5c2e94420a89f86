"""What requests took from the cache, what they missed, how much prefill that saved, and what was stored.

Only counts.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from kvboost.store.forest import reason_kind

_MIN_MEASURED_TOKENS = 32  # fewer say more about overhead than about the speed of prefill


class Usage:
    """Counters of requests and of chunks, under the lock of their store."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._requests = 0
        self._exact_hits = 0
        self._approximate_hits = 0
        self._prompt_tokens = 0
        self._saved_tokens = 0
        self._recomputed_tokens = 0
        self._prefill_tokens = 0
        self._prefill_seconds = 0.0
        self._misses: Counter[str] = Counter()
        self._stored_chunks = 0
        self._refused: Counter[str] = Counter()

    def count_request(
        self,
        *,
        reused: int,
        total: int,
        reason: str,
        approximate: bool = False,
        recomputed: int = 0,
        prefill_seconds: float | None = None,
    ) -> None:
        """Count one request's outcome: `reused` of `total` tokens; why the rest was not, and its cost.

        `approximate` says that not all of it was exact, `recomputed` how much of it was computed again.
        """
        with self._lock:
            self._requests += 1
            self._exact_hits += reused > 0 and not approximate
            self._approximate_hits += approximate
            self._prompt_tokens += total
            self._saved_tokens += reused - recomputed
            self._recomputed_tokens += recomputed
            computed = total - reused + recomputed
            if prefill_seconds is not None and computed >= _MIN_MEASURED_TOKENS:
                self._prefill_tokens += computed
                self._prefill_seconds += prefill_seconds
            if reason and not reason.startswith("computed"):
                self._misses[reason_kind(reason)] += 1

    def count_corrupt(self, chunks: int) -> None:
        """Count chunks that were found damaged."""
        with self._lock:
            self._misses["corrupt"] += chunks

    def count_stored(self) -> None:
        """Count one chunk that was stored."""
        with self._lock:
            self._stored_chunks += 1

    def count_refused(self, reason: str) -> None:
        """Count one chunk, or one text, that was not stored."""
        with self._lock:
            self._refused[reason] += 1

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """As measured so far; None before that."""
        with self._lock:
            return self._prefill_tokens / self._prefill_seconds if self._prefill_seconds else None

    def stats(self) -> dict[str, Any]:
        """The counters; seconds saved are estimated from the prefill that was measured."""
        with self._lock:
            speed = self.prefill_tokens_per_second
            return {
                "requests": self._requests,
                "hits": {"exact": self._exact_hits, "approximate": self._approximate_hits},
                "misses": dict(self._misses),
                "prompt_tokens": self._prompt_tokens,
                "tokens_saved": self._saved_tokens,
                "tokens_recomputed": self._recomputed_tokens,
                "prefill_tokens_per_second": speed,
                "prefill_seconds_saved": self._saved_tokens / speed if speed else None,
                "stored_chunks": self._stored_chunks,
                "refused": dict(self._refused),
            }
