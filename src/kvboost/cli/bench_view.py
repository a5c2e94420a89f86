"""What the benchmark commands share: opening engines, a progress bar, tables, files, the line of JSON.

Knows no benchmark.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvboost.cli.options import ENGINE_OPTIONS
from kvboost.cli.session import opened_engine

if TYPE_CHECKING:
    from kvboost.engine import InferenceEngine

Plot = Callable[[dict[str, Any], Path], list[Path]]


@contextmanager
def opened(
    model: str, engine_options: dict[str, Any], compared: tuple[str, ...]
) -> Iterator[tuple[InferenceEngine, Callable[..., InferenceEngine]]]:
    """An engine without a limit on chunks, and how to open others on the same model."""
    for name in compared:
        if name in engine_options:
            flag = "--" + name.replace("_", "-")
            raise click.UsageError(f"{flag} is what this benchmark compares: leave it out")
    options = {"max_chunks": None, **engine_options, "recompute_strategy": "cacheblend"}
    names = {each.name for each in ENGINE_OPTIONS} - {"device"} | {"recompute_strategy"}
    constructor_options = {name: value for name, value in options.items() if name in names}
    with opened_engine(model, options, Console(stderr=True)) as engine:

        def open_engine(**changes: Any) -> InferenceEngine:
            return type(engine)(engine.model, engine.tokenizer, **{**constructor_options, **changes})

        yield engine, open_engine


@contextmanager
def bar() -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on stderr: steps done, steps in all, what is being done."""
    columns = (BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=None)
        yield lambda done, total, text: progress.update(task, completed=done, total=total, description=text)


def prepare(out: Path | None, *, plot: bool = False) -> None:
    """Make the folder and look for matplotlib: an error now is better than one after the work."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        if plot:
            from kvboost.bench.plots import require_matplotlib

            require_matplotlib()


def show(
    record: dict[str, Any], parts: Sequence[Table | str], out: Path | None, plot: Plot | None = None
) -> None:
    """Print the parts and the verdicts, write the files, and end with the line of JSON."""
    from kvboost.bench.record import write_record

    console = Console(highlight=False, stderr=not parts)
    targets = [targets_table(record["targets"])] if "targets" in record else []
    for part in [*parts, *targets] if parts else []:
        console.print(part, markup=isinstance(part, Table))
    if out is not None:
        paths = [write_record(record, out), *(plot(record, out) if plot else [])]
        console.print(f"written to {', '.join(map(str, paths))}", markup=False)
    click.echo(json.dumps(record))


def targets_table(targets: list[dict[str, Any]]) -> Table:
    """What was to be reached and what was; of several replays the worst counts."""
    table = simple_table("target")
    for heading in ("measured", "limit", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    for target in targets:
        at_most = "at_most" in target
        limit = f"at most {target['at_most']:g}" if at_most else f"at least {target['at_least']:g}"
        measured = target["value"] if "value" in target else target["low"]
        table.add_row(target["name"], f"{measured:.3f}", limit, verdict(target))
    return table


def verdict(item: dict[str, Any]) -> str:
    return "[green]met[/green]" if item["met"] else "[red]missed[/red]"


def title(record: dict[str, Any]) -> str:
    """The model and the machine."""
    machine = record["machine"]
    where = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} threads"
    return f"{record['model']}, {record['dtype']}, {where}"


def simple_table(first_column: str) -> Table:
    """An empty table with its first column."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(first_column, overflow="fold")
    return table
