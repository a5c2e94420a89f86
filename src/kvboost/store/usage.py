"""What requests took from the cache, what they missed, and how much prefill that saved. Only counts."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvboost.store.miss_reasons import reason_kind

_MIN_MEASURED_TOKENS = 32  # fewer say more about overhead than about the speed of prefill


class Usage:
    """Counters of requests. Not thread-safe by itself."""

    def __init__(self) -> None:
        self._requests = 0
        self._exact_hits = 0
        self._approximate_hits = 0
        self._prompt_tokens = 0
        self._saved_tokens = 0
        self._recomputed_tokens = 0
        self._prefill_tokens = 0
        self._prefill_seconds = 0.0
        self.misses: Counter[str] = Counter()

    def count(
        self,
        *,
        reused: int,
        total: int,
        reason: str,
        approximate: bool,
        recomputed: int,
        prefill_seconds: float | None,
    ) -> None:
        """Book one request: `reused` of `total` tokens, why the rest was not, and what it cost."""
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
            self.misses[reason_kind(reason)] += 1

    def stats(self) -> dict[str, Any]:
        """The counters; seconds saved are estimated from the prefill that was measured."""
        speed = self._prefill_tokens / self._prefill_seconds if self._prefill_seconds else None
        return {
            "requests": self._requests,
            "hits": {"exact": self._exact_hits, "approximate": self._approximate_hits},
            "misses": dict(self.misses),
            "prompt_tokens": self._prompt_tokens,
            "tokens_saved": self._saved_tokens,
            "tokens_recomputed": self._recomputed_tokens,
            "prefill_tokens_per_second": speed,
            "prefill_seconds_saved": self._saved_tokens / speed if speed else None,
        }
