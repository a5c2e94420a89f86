"""Looking at or replacing a model's forwards in tests, without hooks: with such, kvboost runs plain.

The class is patched, which kvboost does not look at (docs/limits.md says so).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest


def replace_forward(patch: pytest.MonkeyPatch, model: Any, function: Callable[..., Any]) -> None:
    """Have `function` called instead of the forward of `model`, and of no other."""
    own = type(model).forward

    @functools.wraps(own)
    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        if vars(module)["_modules"] is vars(model)["_modules"]:
            return function(*args, **kwargs)
        return own(module, *args, **kwargs)

    patch.setattr(type(model), "forward", forward)


def on_forward(
    patch: pytest.MonkeyPatch, model: Any, note: Callable[[tuple[Any, ...], dict[str, Any]], Any]
) -> None:
    """Have `note(args, kwargs)` called before every forward of `model`."""
    own = model.forward

    def noting(*args: Any, **kwargs: Any) -> Any:
        note(args, kwargs)
        return own(*args, **kwargs)

    replace_forward(patch, model, noting)


def count_fed(patch: pytest.MonkeyPatch, model: Any) -> list[int]:
    """Tokens of every forward from now on."""
    fed: list[int] = []

    def note(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids")
        fed.append((ids if ids is not None else args[0]).numel())

    on_forward(patch, model, note)
    return fed
