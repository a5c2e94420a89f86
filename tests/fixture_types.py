"""Types of fixtures that many tests take."""

from __future__ import annotations

from collections.abc import Callable

from kvboost import KVBoost

MakeEngine = Callable[..., KVBoost]
