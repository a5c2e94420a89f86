"""From the records of both sides to ratios: which numbers are compared, and how sure the median is.

The interval is made of order statistics of the pair ratios: it needs no assumption about how times are
distributed and no random numbers, and the same pairs always give the same interval. Knows no process.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

CONFIDENCE = 0.95
METHOD = "order statistics of the pair ratios"
_UNITS = {"ms", "us", "ns", "s", "sec", "seconds"}
_RATES = ("_per_s", "_per_sec", "_per_second", "_gb_s", "_mb_s")
# Numbers that say where and how it was run, and the spread beside a median.
_LEFT_OUT = {"machine", "settings", "versions", "targets"}
_SPREAD = {"low", "high", "quartile_1", "quartile_3", "count"}
_LABELS = ("name", "shared_tokens", "method", "turn", "group")  # what tells the entries of a list apart


class NothingToCompareError(Exception):
    """The two records have no number in common that was asked for."""


@dataclass(frozen=True)
class Comparison:
    """One number of both sides over all pairs."""

    name: str
    old: tuple[float, ...]
    new: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """NEW / OLD, pair by pair."""
        return [b / a for a, b in zip(self.old, self.new, strict=True)]

    @property
    def ratio(self) -> float:
        """The median of the pair ratios."""
        return statistics.median(self.ratios)

    def as_record(self) -> dict[str, Any]:
        """All of it for the line of JSON."""
        low, high, coverage = median_interval(self.ratios)
        return {
            "old_median": statistics.median(self.old),
            "new_median": statistics.median(self.new),
            "ratio": self.ratio,
            "low": low,
            "high": high,
            "coverage": coverage,
            "old": list(self.old),
            "new": list(self.new),
        }


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float, float]:
    """`(low, high, coverage)`: k-th lowest to k-th highest value, as narrow as `confidence` allows.

    A value lies below the true median with probability one half, so the number of those that do follows a
    binomial distribution, and `coverage` is exact. Where even all values do not reach `confidence` (fewer
    than six for 95%), the lowest and the highest are returned with the coverage that they have.
    """
    ordered = sorted(values)
    count = len(ordered)
    below, found = 0, (ordered[0], ordered[-1], 1 - 2 / 2**count if count > 1 else 0.0)
    for rank in range((count - 1) // 2 + 1):
        below += math.comb(count, rank)
        coverage = 1 - 2 * below / 2**count
        if coverage < confidence:
            break
        found = (ordered[rank], ordered[count - 1 - rank], coverage)
    return found


def numbers(record: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a record under its dotted path, except those about machine and settings."""
    if isinstance(record, bool):
        return
    if isinstance(record, (int, float)):
        yield path, float(record)
    elif isinstance(record, dict):
        for key, part in record.items():
            if path or key not in _LEFT_OUT:
                yield from numbers(part, _joined(path, str(key)))
    elif isinstance(record, list):
        for label, part in zip(_labels(record), record, strict=True):
            yield from numbers(part, _joined(path, label))


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _labels(entries: list[Any]) -> list[str]:
    """Names of a list's entries: what they call themselves if that tells them apart, else their places."""
    for key in _LABELS:
        names = [str(entry[key]) for entry in entries if isinstance(entry, dict) and key in entry]
        if len(set(names)) == len(entries):
            return names
    return [str(index) for index in range(len(entries))]


def is_timing(path: str) -> bool:
    """Whether a path names a time or a rate, by its unit, and is not the spread beside a median."""
    *_, last = path.split(".")
    return last not in _SPREAD and any(_UNITS & set(part.split("_")) for part in path.split("."))


def is_rate(path: str) -> bool:
    """Whether more is better: so many per second."""
    return any(part.endswith(_RATES) for part in path.split("."))


def choose(old: Any, new: Any, patterns: Sequence[str] = ()) -> list[str]:
    """Paths that both records have: times and rates, or those that match one of the patterns."""
    first, second = dict(numbers(old)), dict(numbers(new))
    shared = [path for path in first if path in second]
    unmatched = [p for p in patterns if not any(fnmatchcase(path, p) for path in shared)]
    if unmatched:
        known = ", ".join(shared) or "none"
        raise NothingToCompareError(
            f"--metric {unmatched[0]} matches no number that both sides have; there are: {known}"
        )
    if patterns:
        return [path for path in shared if any(fnmatchcase(path, p) for p in patterns)]
    timings = [path for path in shared if is_timing(path)]
    if not timings:
        raise NothingToCompareError(
            "both sides have no time and no rate in common; choose other numbers with --metric, "
            f"there are: {', '.join(shared) or 'none'}"
        )
    return timings


def compare(pairs: Sequence[tuple[Any, Any]], chosen: Sequence[str]) -> tuple[list[Comparison], list[str]]:
    """A comparison per path, and the paths for which there is none: missing somewhere, or not above 0."""
    flat = [(dict(numbers(old)), dict(numbers(new))) for old, new in pairs]
    comparisons, left_out = [], []
    for path in chosen:
        old, new = (_series(records, path) for records in zip(*flat, strict=True))
        if old is None or new is None:
            left_out.append(path)
        else:
            comparisons.append(Comparison(path, old, new))
    return comparisons, left_out


def _series(records: Sequence[Mapping[str, float]], path: str) -> tuple[float, ...] | None:
    values = tuple(record.get(path, 0.0) for record in records)
    return values if all(value > 0 and math.isfinite(value) for value in values) else None
