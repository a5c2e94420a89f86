"""`kvboost calibrate`: measure the error of approximate reuse once per model, for --max-kl.

Knows how to show it; measuring and keeping are the engine's.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvboost.cli.options import GroupedCommand, engine_options_with, json_option, setting
from kvboost.cli.session import opened_engine, unlimited
from kvboost.settings import EngineSettings

if TYPE_CHECKING:
    from kvboost.proof.calibration import Calibration


@click.command(cls=GroupedCommand)
@click.argument("model")
@setting("--prompts", 12, "Prompts to measure; more are steadier and take longer.", click.IntRange(min=4))
@json_option
@engine_options_with(max_chunks="no limit")
def calibrate(model: str, prompts: int, as_json: bool, engine_options: dict[str, Any]) -> None:
    """Measure how exact MODEL's approximate reuse is, and keep the result.

    Documents are cached, found again at other places and repaired at several ratios; the error is the
    mean KL divergence from a full prefill over the next 32 tokens. Each prompt asks for a fact; of those that
    full prefill finds, the share that is still found counts too. Both are those of the worse of two ways of
    reading. Engines with --recompute-ratio auto then take the smallest ratio that held --max-kl and
    --min-facts.

    \b
    kvboost calibrate builtin --max-kl 0.05
    kvboost generate builtin PROMPT --recompute-ratio auto --max-kl 0.05 --min-facts 0.8
    """
    from kvboost.proof.calibration import path_of

    asked = {name: engine_options.pop(name, None) for name in ("max_kl", "min_facts")}
    bounds = EngineSettings(recompute_ratio="auto", **asked).bounds  # only to say which ratio holds them
    engine_options.pop("recompute_ratio", None)  # what is measured are several
    console = Console(stderr=True)
    with (
        opened_engine(model, unlimited(engine_options), None if as_json else console) as engine,
        Progress(console=console, disable=as_json or not console.is_terminal, transient=True) as progress,
    ):
        bar = progress.add_task("measuring", total=prompts)
        found = engine.calibrate(
            prompts, report=lambda done, total: progress.update(bar, completed=done, total=total)
        )
    chosen = found.ratio_for(*bounds)
    kept = str(path_of(found.family, found.selector))
    if as_json:
        by_ratio = {
            name: {f"{ratio:g}": value for ratio, value in getattr(found, name).items()}
            for name in ("errors", "facts")
        }
        held = {"max_kl": bounds[0], "min_facts": bounds[1], "recompute_ratio": chosen, "file": kept}
        click.echo(json.dumps({**dataclasses.asdict(found), **by_ratio, **held}))
        return
    _show(found, bounds, chosen)
    click.echo(f"kept in {kept}")


def _show(found: Calibration, bounds: tuple[float | None, float | None], chosen: float | None) -> None:
    from kvboost.proof.calibration import LEAST_QUESTIONS, bounds_text

    table = Table(title=f"{found.model}, {found.selector}, {found.prompts} prompts")
    table.add_column("computed again", justify="right")
    table.add_column("mean KL", justify="right")
    if found.facts:
        table.add_column(f"facts kept, of {found.questions}", justify="right")
    table.add_column("held")
    for ratio, error in sorted(found.errors.items()):
        facts = [f"{found.facts[ratio]:.0%}"] if found.facts else []
        held = "yes" if chosen is not None and ratio >= chosen else "no"
        table.add_row(f"{ratio:.0%}", f"{error:.4f}", *facts, held)
    Console().print(table)
    if bounds[1] is not None and found.questions < LEAST_QUESTIONS:
        click.echo(
            f"full prefill answered {found.questions} of {found.prompts} questions, and it takes "
            f"{LEAST_QUESTIONS} to say what is kept: use more --prompts"
        )
    words = bounds_text(*bounds)
    if chosen is None:
        click.echo(f"no ratio held {words}: with it there is exact reuse only")
    else:
        click.echo(f"{words} takes a ratio of {chosen:g}")
