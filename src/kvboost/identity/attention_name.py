"""The name of a model's own attention implementation, also while ours stands in its config.

Knows names, no attention.
"""

from __future__ import annotations

from typing import Any


class BorrowedName(str):
    """Our name while it stands in a model's config. A copy of the config gets the model's own name."""

    own: str

    def __deepcopy__(self, _memo: object) -> str:
        return self.own

    def __copy__(self) -> str:
        return self.own

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self.own,)


BORROWED_NAMES: dict[str, BorrowedName] = {}  # by the model's own implementation


def own_name(name: Any) -> Any:
    """The model's own attention implementation, where `name` stands in its config."""
    if isinstance(name, BorrowedName):
        return name.own
    return next((own for own, ours in BORROWED_NAMES.items() if ours == name), name)
