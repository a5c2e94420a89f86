"""Several whole numbers as one option, with commas between them."""

from __future__ import annotations

import click


def read_counts(_context: click.Context, _option: click.Parameter, value: str) -> tuple[int, ...]:
    """A callback for options: `1024,2048` becomes (1024, 2048)."""
    try:
        counts = tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"expected numbers with commas between them, got {value!r}") from None
    if min(counts) < 1:
        raise click.BadParameter(f"every number must be at least 1, got {min(counts)}")
    return counts
