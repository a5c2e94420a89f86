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
from kvboost.settings import DEFAULT_MAX_KL

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
    mean KL divergence from a full prefill over the next 32 tokens, of the worse of two ways of caching.
    Engines with --recompute-ratio auto then take the smallest ratio that held --max-kl.

    \b
    kvboost calibrate builtin --max-kl 0.05
    kvboost generate builtin PROMPT --recompute-ratio auto --max-kl 0.05
    """
    from kvboost.proof.calibration import path_of

    bound = engine_options.pop("max_kl", None) or DEFAULT_MAX_KL  # only to say which ratio holds it
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
    chosen = found.ratio_for(bound)
    kept = str(path_of(found.family, found.selector))
    if as_json:
        errors = {f"{ratio:g}": error for ratio, error in found.errors.items()}
        document = {**dataclasses.asdict(found), "errors": errors}
        click.echo(json.dumps({**document, "max_kl": bound, "recompute_ratio": chosen, "file": kept}))
        return
    _show(found, bound, chosen)
    click.echo(f"kept in {kept}")


def _show(found: Calibration, bound: float, chosen: float | None) -> None:
    table = Table(title=f"{found.model}, {found.selector}, {found.prompts} prompts")
    table.add_column("computed again", justify="right")
    table.add_column("mean KL", justify="right")
    table.add_column(f"below {bound:g}")
    for ratio, error in sorted(found.errors.items()):
        table.add_row(f"{ratio:.0%}", f"{error:.4f}", "yes" if error <= bound else "no")
    Console().print(table)
    if chosen is None:
        click.echo(f"no ratio held {bound:g}: with --max-kl {bound:g} there is exact reuse only")
    else:
        click.echo(f"--max-kl {bound:g} takes a ratio of {chosen:g}")
