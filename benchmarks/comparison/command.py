"""The command `benchmarks/ab`: its options, the order of the runs, the table and the line of JSON."""

from __future__ import annotations

import json
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import click
from rich import box
from rich.console import Console
from rich.table import Table

from .checkouts import Checkout, CheckoutError, opened
from .ratios import (
    CONFIDENCE,
    METHOD,
    Comparison,
    NothingToCompareError,
    choose,
    compare,
    is_rate,
    median_interval,
)
from .sides import Side, SideError

ROOT = Path(__file__).resolve().parents[2]
INTERRUPTED = 130
_OPEN_OPTIONS = {"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
Pairs = list[tuple[dict[str, Any], dict[str, Any]]]


@click.command(context_settings=_OPEN_OPTIONS)
@click.argument("old")
@click.argument("new")
@click.argument("bench", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option(
    "--pairs", type=click.IntRange(min=1), default=15, show_default=True, help="Runs of each side that count."
)
@click.option(
    "--warm-ups",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="Runs of each side before them that do not.",
)
@click.option(
    "--metric",
    "patterns",
    multiple=True,
    metavar="PATTERN",
    help="Compare the numbers whose dotted path matches, like '*.kvboost.ttft_ms.median'; can be repeated. "
    "Without it: all times and rates that both sides report.",
)
@click.option(
    "--at-most",
    type=click.FloatRange(min=0, min_open=True),
    metavar="X",
    help="Exit with status 1 if the median ratio of a compared time is above X.",
)
@click.option("--json", "as_json", is_flag=True, help="Print only the line of JSON.")
@click.option(
    "--repository", type=_FOLDER, default=ROOT, show_default="this one", help="Where revisions are looked up."
)
@click.option("--debug", is_flag=True, help="With an error, show what the failing side wrote.")
def ab(
    old: str,
    new: str,
    bench: tuple[str, ...],
    pairs: int,
    warm_ups: int,
    patterns: tuple[str, ...],
    at_most: float | None,
    as_json: bool,
    repository: Path,
    debug: bool,
) -> None:
    """Compare two checkouts of the project, OLD and NEW, on one benchmark.

    OLD and NEW are git revisions, or folders that hold a checkout. Each side is one process with its own
    code that loads the model once; the two take turns, in the order old new, new old, old new, ... and
    never run at the same time. What is printed per number is the median of the ratios NEW / OLD of all
    pairs, with a 95% interval: if it holds 1, no difference was seen. Below 1 NEW takes less time; for
    rates (..._per_s) above 1 is better.

    BENCH is what follows `kvboost bench`, with options, or one of three of our own:

    \b
    warm     time to the first token of a prompt whose beginning is cached
    decode   time per token of an answer over cached text
    together prompts behind new beginnings that they share, in one `generate_batch`

    \b
      --tokens N       shared tokens, read before  (1024)
      --tail-tokens N  new tokens behind them, others in every call  (20)
      --new-tokens N   length of the answers  (warm: 1, others: 32)
      --repeat N       calls per run, of which the median counts  (warm: 5, decode: 3, together: 1)
      --prompts N      together: prompts of a call  (8)
      --prefixes N     together: beginnings that are shared, of --tokens each  (1)
      --model NAME     a hub name, a folder, "builtin" or "random:..."  (builtin)
      --mode MODE      as in generate
      --any-other V    an option of from_pretrained, like --dtype bfloat16

    The options below are taken from anywhere in the line; a benchmark's own of the same name stand
    behind "--". The exit status is 0, 1 if --at-most was exceeded, 2 for an error.

    \b
    benchmarks/ab HEAD~1 HEAD warm
    benchmarks/ab main . decode --tokens 4096 --at-most 1.02
    benchmarks/ab v0.1 HEAD prefix --lengths 1024 --rounds 3 --pairs 10 -- --pairs 1
    """
    with ExitStack() as stack:
        checkouts = stack.enter_context(opened(repository, old, new))
        sides = [stack.enter_context(Side(checkout, bench)) for checkout in checkouts]
        try:
            for side in sides:
                _prepare(side)
            measured = _measure(sides, pairs, warm_ups, _check(patterns, at_most))
        except SideError:
            if debug:
                _tell("\n".join(side.log() for side in sides))
            raise
    comparisons, left_out = compare(measured, choose(*measured[0], patterns))
    if not comparisons:
        raise NothingToCompareError(f"none of these is above 0 in every run: {', '.join(left_out)}")
    _show(checkouts, bench, comparisons, left_out, at_most, as_json=as_json)


def _tell(text: str) -> None:
    click.echo(text, err=True)


def _prepare(side: Side) -> None:
    where = side.check_import()
    _tell(f"{side.checkout.side}: {side.checkout.given}, {where}")
    side.prepare()


def _check(patterns: Sequence[str], at_most: float | None) -> Callable[[Any, Any], str]:
    """A check of the first two records, before hours are spent; returns the number to tell about."""

    def check(old: Any, new: Any) -> str:
        chosen = choose(old, new, patterns)
        rates = [path for path in chosen if is_rate(path)]
        if at_most is not None and rates:
            raise NothingToCompareError(
                f"--at-most is for times, and {rates[0]} is a rate: choose with --metric"
            )
        return chosen[0]

    return check


def _measure(sides: Sequence[Side], pairs: int, warm_ups: int, check: Callable[[Any, Any], str]) -> Pairs:
    """The records of all pairs that count."""
    found: Pairs = []
    told = None
    for number in range(-warm_ups, pairs):
        order = (0, 1) if (number + warm_ups) % 2 == 0 else (1, 0)
        records = {index: sides[index].measure() for index in order}
        old, new = records[0], records[1]
        told = told or check(old, new)
        if number < 0:
            _tell(f"warm-up {number + warm_ups + 1} of {warm_ups}")
            continue
        found.append((old, new))
        comparison = compare([(old, new)], [told])[0]
        values = f"{told} {_values(comparison[0])}" if comparison else f"{told} not above 0"
        _tell(f"pair {number + 1} of {pairs}: {values}")
    return found


def _values(comparison: Comparison) -> str:
    return f"{comparison.old[0]:,.5g} -> {comparison.new[0]:,.5g} ({comparison.ratio:.3f})"


def _show(
    checkouts: Sequence[Checkout],
    bench: Sequence[str],
    comparisons: Sequence[Comparison],
    left_out: Sequence[str],
    at_most: float | None,
    *,
    as_json: bool,
) -> None:
    """The table, the line of JSON, and the exit status."""
    exceeded = [c.name for c in comparisons if at_most is not None and c.ratio > at_most]
    if not as_json:
        console = Console(highlight=False)
        title = f"{' '.join(bench)}: {checkouts[0].given} -> {checkouts[1].given}"
        console.print(title, markup=False)
        console.print(_table(comparisons, exceeded))
        console.print(_explanation(comparisons[0]))
        if left_out:
            console.print(f"Left out, because not above 0 in every run: {', '.join(left_out)}", markup=False)
    record = {
        "comparison": list(bench),
        "old": checkouts[0].as_record(),
        "new": checkouts[1].as_record(),
        "pairs": len(comparisons[0].old),
        "interval": METHOD,
        "metrics": {c.name: c.as_record() for c in comparisons},
        "at_most": at_most,
        "exceeded": exceeded,
    }
    click.echo(json.dumps(record))
    if exceeded:
        click.echo(f"above {at_most:g}: {', '.join(exceeded)}", err=True)
        sys.exit(1)


def _table(comparisons: Sequence[Comparison], exceeded: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", overflow="fold")
    for heading in ("old\nmedian", "new\nmedian", "new / old\nmedian", "interval"):
        table.add_column(heading, justify="right", no_wrap=True)
    for comparison in comparisons:
        low, high, _ = median_interval(comparison.ratios)
        table.add_row(
            comparison.name + (" (a rate)" if is_rate(comparison.name) else ""),
            f"{statistics.median(comparison.old):,.5g}",
            f"{statistics.median(comparison.new):,.5g}",
            f"{comparison.ratio:.3f}",
            f"{low:.3f} to {high:.3f}",
            style="red" if comparison.name in exceeded else None,
        )
    return table


def _explanation(comparison: Comparison) -> str:
    ratios = comparison.ratios
    coverage = median_interval(ratios)[2]
    text = f"Interval: {METHOD}, {coverage:.0%} for the median of {len(ratios)} pairs."
    return text if coverage >= CONFIDENCE else f"{text} Too few for {CONFIDENCE:.0%}: take six or more."


def main() -> NoReturn:
    """Run the command; what can go wrong is said in a line."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))  # so that clean-up runs
    try:
        ab.main(prog_name="benchmarks/ab", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(INTERRUPTED)
    except (CheckoutError, SideError, NothingToCompareError, OSError) as error:
        click.secho(f"error: {error}", fg="red", err=True)
        sys.exit(2)
    sys.exit(0)
