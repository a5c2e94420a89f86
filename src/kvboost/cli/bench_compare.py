"""`kvboost bench compare`: what changed between two results of the same benchmark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from kvboost.cli.bench_view import simple_table
from kvboost.cli.options import json_option, setting
from kvboost.errors import InvalidRequestError

# Numbers that say where and how it was run, and spreads beside a median.
_LEFT_OUT = ("machine", "settings", "versions")
_SPREAD = ("low", "high", "quartile_1", "quartile_3", "count")
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("before", type=_FILE)
@click.argument("after", type=_FILE)
@setting("--changed-by", 5.0, "Show changes from, in %.", click.FloatRange(min=0))
@json_option
def compare(before: Path, after: Path, changed_by: float, as_json: bool) -> None:
    """Show what changed from BEFORE to AFTER, two result files of the same benchmark.

    \b
    kvboost bench compare benchmarks/results/prefix-cpu.json results/prefix-cpu.json
    """
    old, new = (read_result(path) for path in (before, after))
    names = tuple(document.get("benchmark") or document.get("proof") for document in (old, new))
    if names[0] != names[1]:
        raise InvalidRequestError(f"these are results of two benchmarks: {names[0]} and {names[1]}")
    changes = compared(old, new)
    shown = [
        row for row in changes if row["change_percent"] is None or abs(row["change_percent"]) >= changed_by
    ]
    different = settings_changed(old, new)
    if as_json:
        click.echo(json.dumps({"benchmark": names[0], "different": different, "changes": shown}))
        return
    console = Console(highlight=False)
    for line in different:
        console.print(f"[yellow]not alike[/yellow]: {line}")
    table = simple_table("", "before", "after", "change")
    for row in shown:
        change = "" if row["change_percent"] is None else f"{row['change_percent']:+.0f}%"
        table.add_row(row["name"], _number(row["before"]), _number(row["after"]), change)
    console.print(table)
    console.print(f"{len(shown)} of {len(changes)} numbers changed by {changed_by:g}% or more")


def read_result(path: Path) -> dict[str, Any]:
    """A result file."""
    try:
        document = json.loads(path.read_text())
    except ValueError as error:
        raise InvalidRequestError(f"{path} is no JSON ({error})") from error
    if not isinstance(document, dict) or not ({"benchmark", "proof"} & document.keys()):
        raise InvalidRequestError(f"{path} is no result of a benchmark")
    return document


def compared(old: dict[str, Any], new: dict[str, Any]) -> list[dict[str, Any]]:
    """Every number of both, by name, with its change; None where one has none."""
    before, after = dict(_numbers(old)), dict(_numbers(new))
    rows = []
    for name in [*before, *(name for name in after if name not in before)]:
        a, b = before.get(name), after.get(name)
        change = 100 * (b - a) / abs(a) if a and b is not None else (0.0 if a == b else None)
        rows.append({"name": name, "before": a, "after": b, "change_percent": change})
    return rows


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Numbers of a document by their path; entries of a list by what tells them apart."""
    if isinstance(value, bool):
        return
    if isinstance(value, (int, float)):
        yield name, float(value)
    elif isinstance(value, dict):
        for key, part in value.items():
            if not (not name and key in _LEFT_OUT) and key not in _SPREAD:
                yield from _numbers(part, f"{name} {key}".strip())
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from _numbers(part, f"{name} {_label(part, index)}")


def _label(part: Any, index: int) -> str:
    if isinstance(part, dict):
        for key in ("name", "shared_tokens", "method", "turn", "group"):
            if key in part:
                return str(part[key])
    return str(index)


def settings_changed(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What of machine and settings differs, in words."""
    lines = []
    for part in ("model", "dtype", "settings", "machine"):
        a, b = old.get(part), new.get(part)
        if not isinstance(a, dict) or not isinstance(b, dict):
            if a != b:
                lines.append(f"{part} {a} and {b}")
            continue
        keys = [*a, *(key for key in b if key not in a)]
        lines += [
            f"{key} {a.get(key)} and {b.get(key)}"
            for key in keys
            if a.get(key) != b.get(key) and key not in ("date", "load_average")
        ]
    return lines


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}"
