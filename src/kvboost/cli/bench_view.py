"""What the benchmark commands share: flags, opening engines, a progress bar, tables, files, the line of JSON.

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
from rich.table import Column, Table

from kvboost.cli.options import ENGINE_OPTIONS, model_option, setting
from kvboost.cli.session import FOLDER, opened_engine, unlimited

if TYPE_CHECKING:
    from kvboost.engine import InferenceEngine

Plot = Callable[[dict[str, Any], Path], list[Path]]
out_option = click.option("--out", type=FOLDER, help="Also write the JSON into this folder.")
json_line = click.option("--json", "as_json", is_flag=True, help="Print only the line of JSON.")


def shared_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What benchmarks of found documents take beside their own options and the engine's."""
    options = (
        model_option,
        setting("--seed", 0, "Of texts, orders and questions.", int),
        click.option(
            "--out", type=FOLDER, help="Also write the JSON and a plot (SVG and PNG) into this folder."
        ),
        setting("--plot/--no-plot", True, "With --out.", None),
        json_line,
    )
    for option in reversed(options):
        command = option(command)
    return command


def read_counts(_context: click.Context, _option: click.Parameter, value: str) -> tuple[int, ...]:
    """A callback for options: `1024,2048` becomes (1024, 2048)."""
    try:
        counts = tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"expected numbers with commas between them, got {value!r}") from None
    if min(counts) < 1:
        raise click.BadParameter(f"every number must be at least 1, got {min(counts)}")
    return counts


def read_shares(_context: click.Context, _option: click.Parameter, value: str) -> tuple[float, ...]:
    """A callback for options: `0.05,0.10` becomes (0.05, 0.1)."""
    try:
        shares = tuple(float(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"expected numbers with commas between them, got {value!r}") from None
    if not all(0 < share <= 1 for share in shares):
        raise click.BadParameter(f"every number must be above 0 and at most 1, got {value!r}")
    return tuple(dict.fromkeys(shares))


def read_names(
    allowed: tuple[str, ...], _context: click.Context, _option: click.Parameter, value: str
) -> tuple[str, ...]:
    """A callback for options: `guided,random`, each of them allowed."""
    names = tuple(dict.fromkeys(part.strip() for part in value.split(",")))
    for name in names:
        if name not in allowed:
            raise click.BadParameter(f"expected some of {', '.join(allowed)}, got {name!r}")
    return names


@contextmanager
def opened(
    model: str, engine_options: dict[str, Any], compared: tuple[str, ...]
) -> Iterator[tuple[InferenceEngine, Callable[..., InferenceEngine]]]:
    """An engine without a limit on chunks, and how to open others on the same model."""
    for name in compared:
        if name in engine_options:
            flag = "--" + name.replace("_", "-")
            raise click.UsageError(f"{flag} is what this benchmark compares: leave it out")
    options = {**unlimited(engine_options), "recompute_strategy": "cacheblend"}
    names = {each.name for each in ENGINE_OPTIONS} - {"device"} | {"recompute_strategy"}
    constructor_options = {name: value for name, value in options.items() if name in names}
    with opened_engine(model, options, Console(stderr=True)) as engine:

        def open_engine(**changes: Any) -> InferenceEngine:
            made = type(engine)(engine.model, engine.tokenizer, **{**constructor_options, **changes})
            made.core.notice.silence()  # the benchmark says what is approximate
            return made

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
    table = simple_table("target", "measured", "limit", "")
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


def simple_table(first: str | Column, *others: str | Column, above: str | None = None) -> Table:
    """An empty table: where only headings are given, the first column is for names, others for numbers."""
    names = Column(first, overflow="fold") if isinstance(first, str) else first
    columns = [names, *numbers(*others)]
    return Table(*columns, title=above, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def numbers(*headings: str | Column) -> list[Column]:
    """Columns for numbers."""
    return [
        Column(each, justify="right", no_wrap=True) if isinstance(each, str) else each for each in headings
    ]
