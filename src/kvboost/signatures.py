"""Callables that take the parameters of a dataclass, in the eyes of Python, editors and type checkers.

Knows no options.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, get_type_hints

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
A = TypeVar("A")


def takes(_arguments: Callable[P, Any]) -> Callable[[Callable[..., R]], Callable[Concatenate[Any, P], R]]:
    """Give a class method the parameters of a dataclass, in the eyes of editors and type checkers."""
    return lambda method: method


def constructor_takes(
    arguments: Callable[P, A],
) -> Callable[[Callable[[S, A], None]], Callable[Concatenate[S, P], None]]:
    """Let a constructor take the parameters of a dataclass, and get them as one, checked."""
    taken, hints = inspect.signature(arguments), get_type_hints(arguments)

    def decorate(method: Callable[[S, A], None]) -> Callable[Concatenate[S, P], None]:
        @functools.wraps(method)
        def init(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
            try:
                taken.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{method.__qualname__}() {error}") from None
            method(self, arguments(*args, **kwargs))

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        parameters = taken.parameters.values()
        init.__signature__ = inspect.Signature([own, *parameters])  # type: ignore[attr-defined]
        init.__annotations__ = {each.name: hints[each.name] for each in parameters}
        del init.__wrapped__  # whose parameters are others
        return init

    return decorate
