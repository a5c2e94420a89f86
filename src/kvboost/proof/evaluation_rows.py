"""The ways to answer that are compared, and the row of each in a report. Knows no questions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

HEADINGS = ("", "right", "kept", "first token, ms", "speed-up", "reused", "recomputed")


@dataclass(frozen=True)
class Contestant:
    """One way to answer: a mode, and in the approximate one a ratio."""

    mode: str
    ratio: float | None = None

    @property
    def name(self) -> str:
        return self.mode if self.ratio is None else f"{self.mode} {self.ratio:.0%}"

    @property
    def options(self) -> dict[str, Any]:
        """As a call of `generate` takes them."""
        return {"mode": self.mode} | ({} if self.ratio is None else {"recompute_ratio": self.ratio})


@dataclass(frozen=True)
class EvaluationRow:
    """One contestant. `kept` are the questions that BASELINE and this one answer rightly, `lost` the ids of
    those that only BASELINE does. `ttft_ms` is the median, `speedup` the median over the questions of
    BASELINE's time by this one's; the shares are of all prompt tokens.
    """

    mode: str
    ratio: float | None
    questions: int
    right: int
    baseline_right: int
    kept: int
    lost: tuple[str, ...]
    ttft_ms: float
    speedup: float
    reused_share: float
    recomputed_share: float

    @property
    def name(self) -> str:
        return Contestant(self.mode, self.ratio).name

    @property
    def accuracy(self) -> float:
        """The share of right answers."""
        return self.right / self.questions

    @property
    def kept_share(self) -> float | None:
        """The share of BASELINE's right answers that are right here too; None where it has none."""
        return self.kept / self.baseline_right if self.baseline_right else None

    def cells(self) -> tuple[str, ...]:
        """As text, for tables with `HEADINGS`."""
        kept = "" if self.kept_share is None else f"{self.kept}/{self.baseline_right} ({self.kept_share:.0%})"
        return (
            self.name,
            f"{self.right}/{self.questions} ({self.accuracy:.0%})",
            kept,
            f"{self.ttft_ms:,.0f}",
            f"{self.speedup:.2f} x",
            f"{self.reused_share:.0%}",
            f"{self.recomputed_share:.0%}",
        )
