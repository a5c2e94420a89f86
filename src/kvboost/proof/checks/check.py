"""What a check says of one part of an engine, and the kinds of reuse that stand or fall with it."""

from __future__ import annotations

from dataclasses import dataclass

EXACT, QUANTIZED, APPROXIMATE = "exact", "quantized", "approximate"


@dataclass(frozen=True)
class Check:
    """One part of the engine; `passed` is None where it was not judged, and `detail` says why or how far off.

    `kind` is the kind of reuse that stands or falls with it.
    """

    name: str
    kind: str
    passed: bool | None
    detail: str = ""
    value: float | None = None
    bound: float | None = None
