"""`kvboost bench quality`: the error of documents found again anywhere.

Knows how the record is shown, not how it is measured.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.table import Table

from kvboost.cli.bench_rag import COMPARED
from kvboost.cli.bench_view import (
    bar,
    opened,
    prepare,
    read_counts,
    read_names,
    read_shares,
    shared_options,
    show,
    simple_table,
    title,
    verdict,
)
from kvboost.cli.options import GroupedCommand, engine_options
from kvboost.cli.options import bits as read_bits
from kvboost.reuse.strategies import STRATEGIES

METHODS = tuple(STRATEGIES)
_COUNT = click.IntRange(min=1)
_COUNT_OR_NONE = click.IntRange(min=0)


def read_widths(_context: click.Context, _option: click.Parameter, value: str) -> tuple[Any, ...]:
    """A callback for options: `8,k8v4` becomes (8, "k8v4"), and `none` nothing."""
    return (
        () if value == "none" else tuple(dict.fromkeys(read_bits(part.strip()) for part in value.split(",")))
    )


@click.command(cls=GroupedCommand)
@click.option("--prompts", type=_COUNT, default=64, show_default=True, help="In all groups together.")
@click.option(
    "--documents",
    default="4,8",
    show_default=True,
    callback=read_counts,
    help="Documents per prompt; each number is one group cached alone, one behind other text, one together.",
)
@click.option(
    "--prompt-tokens", type=_COUNT, default=1_500, show_default=True, help="Of all documents, about."
)
@click.option(
    "--ratios",
    default="0.05,0.10,0.15,0.20,0.30",
    show_default=True,
    callback=read_shares,
    help="Shares of the reused tokens that are recomputed.",
)
@click.option(
    "--methods",
    default=",".join(METHODS),
    show_default=True,
    callback=functools.partial(read_names, METHODS),
    help="What is compared.",
)
@click.option(
    "--continuation", type=_COUNT, default=32, show_default=True, help="Tokens over which the error is taken."
)
@click.option(
    "--facts",
    type=_COUNT_OR_NONE,
    default=24,
    show_default=True,
    help="Questions for a fact that full prefill answers.",
)
@click.option(
    "--fact-ratios",
    default="0.10,0.15,0.30",
    show_default=True,
    callback=read_shares,
    help="Shares of recomputed tokens that facts are asked over.",
)
@click.option(
    "--budgets",
    default="0.02,0.03,0.05",
    show_default=True,
    callback=read_shares,
    help="Errors (max_kl) to be held on prompts that were not calibrated with.",
)
@click.option(
    "--bits",
    default="8,k8v4,4",
    show_default=True,
    callback=read_widths,
    help='Widths of cached KV that guided at 10% is measured with beside 16; "none" = no other.',
)
@shared_options
@engine_options
def quality(
    prompts: int,
    documents: tuple[int, ...],
    prompt_tokens: int,
    ratios: tuple[float, ...],
    methods: tuple[str, ...],
    continuation: int,
    facts: int,
    fact_ratios: tuple[float, ...],
    budgets: tuple[float, ...],
    bits: tuple[Any, ...],
    model: str,
    seed: int,
    out: Path | None,
    plot: bool,
    as_json: bool,
    engine_options: dict[str, Any],
) -> None:
    """The error of reusing documents in another order, by what is recomputed.

    Documents with made-up facts are read once, alone, behind other text or together (warm_documents),
    and come back in another order behind a question. Error is the mean KL divergence of the next tokens
    from those after full prefill. Facts kept is the share of questions for a number, a name or a date that
    full prefill answers and that are still answered. Speed-up is that of the time until the prompt's KV is
    ready. About three quarters of an hour with the default settings on two slow cores.

    \b
    kvboost bench quality --out results
    kvboost bench quality --prompts 8 --ratios 0.10 --methods nothing,deviation,guided --facts 0
    """
    from benchmarks.suite import plots
    from benchmarks.suite.quality import QualitySettings, run

    settings = QualitySettings(
        prompts,
        documents,
        prompt_tokens,
        ratios,
        methods,
        continuation_tokens=continuation,
        facts=facts,
        fact_methods=tuple(method for method in ("nothing", "deviation", "guided") if method in methods),
        fact_ratios=fact_ratios,
        budgets=budgets,
        seed=seed,
        bits=bits if "guided" in methods else (),
    )
    settings.check()
    prepare(out, plot=plot)
    with (
        opened(model, engine_options, (*COMPARED, "kv_cache_bits")) as (engine, open_engine),
        bar() as report,
    ):
        calibration = None
        if budgets and "guided" in methods:
            calibration = engine.calibrate(report=lambda done, total: report(done, total, "calibrating"))
        record = run(engine, model, settings, open_engine, report, calibration)
    tables: list[Table | str] = (
        []
        if as_json
        else [quality_table(record), groups_table(record), facts_table(record), budgets_table(record)]
    )
    show(record, tables, out, plots.plot_error if plot else None)


def quality_table(record: dict[str, Any]) -> Table:
    """A row per method and ratio: the error over all prompts, and what it costs."""
    table = Table(title=title(record), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("recomputed", no_wrap=True)
    for heading in ("share", "mean KL (95%)", "same top\ntoken", "KV ready,\nms", "speed-\nup"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in _in_sections(table, record["results"]):
        overall = result["groups"]["overall"]
        share = overall["recomputed_share"]
        table.add_row(
            _row_name(result),
            "-" if share is None else f"{share:.1%}",
            f"{overall['kl_mean']:.4f} ({overall['kl_mean_low']:.4f}-{overall['kl_mean_high']:.4f})",
            f"{overall['top1']:.1%}",
            f"{overall['seconds'] * 1e3:,.0f}",
            f"{overall['speedup']:.1f}",
        )
    return table


def groups_table(record: dict[str, Any]) -> Table:
    """A row per method and ratio: the mean KL in every group."""
    table = simple_table("mean KL of")
    for name, group in record["groups"].items():
        table.add_column(f"{name}\n({group['prompts']} prompts)", justify="right", no_wrap=True)
    for result in _in_sections(table, record["results"]):
        errors = (result["groups"][name]["kl_mean"] for name in record["groups"])
        table.add_row(_row_name(result), *(f"{error:.4f}" for error in errors))
    return table


def _in_sections(table: Table, results: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The results, with a line in `table` before and after those of a method with several."""
    before: dict[str, Any] | None = None
    for result in results:
        if before and before["method"] != result["method"] and {before["ratio"], result["ratio"]} != {None}:
            table.add_section()
        yield result
        before = result


def _row_name(result: dict[str, Any]) -> str:
    name = result["method"].replace("_", " ")
    name = name if result["ratio"] is None else f"{name} {result['ratio']:.0%}"
    width = result["bits"] if result["bits"] == "k8v4" else f"{result['bits']}-bit"
    return name if result["bits"] == 16 else f"{name} {width}"


def facts_table(record: dict[str, Any]) -> Table | str:
    """A row per method and ratio: how many of the facts that full prefill finds were kept."""
    facts = record["facts"]
    if facts is None:
        return "Facts: not asked for."
    if not facts["answered"]:
        return f"Facts: full prefill answered none of {facts['asked']} questions rightly."
    table = simple_table(f"facts kept, of {facts['answered']}")
    ways = list(facts["results"][0]["kept"])
    for way in ways:
        table.add_column(f"read\n{way}", justify="right", no_wrap=True)
    for result in facts["results"]:
        shares = (f"{result['kept'][way]} ({result['kept_share'][way]:.0%})" for way in ways)
        table.add_row(_row_name({**result, "bits": 16}), *shares)
    return table


def budgets_table(record: dict[str, Any]) -> Table:
    """A row per error budget: the ratio that held it, and the error on the other prompts."""
    table = simple_table("error budget (max_kl)")
    for heading in ("ratio chosen", "KL when\ncalibrated", "KL of the\nother half", "at most\n1.5 x"):
        table.add_column(heading, justify="right", no_wrap=True)
    for budget in record["budgets"]:
        refused = budget["ratio"] is None
        table.add_row(
            f"{budget['max_kl']:g}",
            "none: exact only" if refused else f"{budget['ratio']:.0%}",
            "-" if refused else f"{budget['calibration_kl']:.4f}",
            "-" if refused else f"{budget['held_out_kl']:.4f}",
            verdict(budget),
        )
    return table
