"""A second engine on the same model, with an empty cache. Knows no more of engines than their settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from kvboost.settings import EngineSettings


class MakesEngines(Protocol):
    """What stands behind an engine, as far as another is made like it."""

    engine_class: Callable[..., Any]


class HasSettings(Protocol):
    """An engine, as far as another is made like it."""

    model: Any
    tokenizer: Any
    settings: EngineSettings

    @property
    def core(self) -> MakesEngines:
        """What stands behind it."""


Engine = TypeVar("Engine", bound=HasSettings)


def fresh_engine(engine: Engine, **changes: Any) -> Engine:
    """A plain engine on the same model with the same settings but `changes`, without limits and disk."""
    options = {**engine.settings.engine_options, "device": None, "max_chunks": None, "max_cache_bytes": None}
    options |= {"disk_cache_dir": None, "disk_cache_bytes": None, **changes}
    made: Engine = engine.core.engine_class(engine.model, engine.tokenizer, strict=False, **options)
    return made
