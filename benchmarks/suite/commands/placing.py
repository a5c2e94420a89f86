"""`kvboost bench mixtures` and `kvboost bench homes`: whether reuse pays, and what placing KV takes.

Knows how their records are shown, not how they are measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.table import Table

from kvboost.cli.bench_view import (
    bar,
    json_line,
    opened,
    out_option,
    prepare,
    read_counts,
    show,
    simple_table,
    title,
)
from kvboost.cli.options import GroupedCommand, engine_options, model_option, setting


@click.command(cls=GroupedCommand)
@setting("--mixtures", 20, "Prompts of different kinds.")
@setting("--shortest", 500, "Tokens of the shortest prompt.")
@setting("--longest", 32_000, "Tokens of the longest prompt.")
@setting("--most-documents", 30, "Per prompt.")
@setting("--rounds", 3, "Per mixture, in pairs with BASELINE.")
@setting("--seed", 0, "Of shares, documents and texts.", int)
@model_option
@out_option
@json_line
@engine_options
def mixtures(
    model: str, out: Path | None, as_json: bool, engine_options: dict[str, Any], **options: Any
) -> None:
    """Does reuse of moved text ever lose? Prompts of many sizes, of which more or less is known.

    Of every document the first part was read before, elsewhere; all else is new in every round. Each prompt
    is asked in pairs with BASELINE, and the engine decides whether reuse pays.

    \b
    kvboost bench mixtures --model random:8b --dtype bfloat16 --cache-device model --out results
    kvboost bench mixtures --mixtures 4 --longest 1000 --rounds 1
    """
    from benchmarks.suite.mixtures import MixtureSettings, run

    settings = MixtureSettings(**options)
    prepare(out)
    with opened(model, engine_options, ("max_chunks",)) as (engine, _), bar() as report:
        engine.core.notice.silence()
        record = run(engine, model, settings, report)
    show(record, [] if as_json else [mixtures_table(record)], out)


def mixtures_table(record: dict[str, Any]) -> Table:
    """A row per mixture."""
    table = simple_table(
        "tokens",
        "docu-\nments",
        "known",
        "reused",
        "recom-\nputed",
        "baseline,\nms",
        "ms",
        "x",
        above=title(record),
    )
    for row in record["rows"]:
        table.add_row(
            f"{row['tokens']:,}",
            str(row["documents"]),
            f"{row['known']:.0%}",
            f"{row['cached_share']:.0%}",
            f"{row['recomputed_share']:.0%}",
            f"{row['baseline_ttft_ms']['median']:,.0f}",
            f"{row['ttft_ms']['median']:,.0f}",
            f"{row['ratio']:.3f}",
        )
    return table


@click.command(cls=GroupedCommand)
@setting("--lengths", "8192,32768", "Cached tokens, one measurement each.", str, callback=read_counts)
@setting("--tail-tokens", 20, "New tokens behind them.")
@setting("--rounds", 5, "Each with a new tail.")
@setting("--seed", 0, "Of the texts.", int)
@model_option
@out_option
@json_line
@engine_options
def homes(
    model: str, out: Path | None, as_json: bool, engine_options: dict[str, Any], **options: Any
) -> None:
    """The first token behind cached text, by where its KV lies and by its bits. Needs a GPU.

    On the GPU, or in pinned memory of the host, beside one bare copy of the same bytes from there.

    \b
    kvboost bench homes --model random:8b --dtype bfloat16 --out results
    """
    from benchmarks.suite.homes import HomeSettings, run

    compared = ("max_chunks", "cache_device", "gpu_cache_bytes", "kv_cache_bits")
    settings = HomeSettings(**options)
    prepare(out)
    with opened(model, engine_options, compared) as (engine, open_engine), bar() as report:
        record = run(engine, model, settings, open_engine, report)
    show(record, [] if as_json else [homes_table(record)], out)


def homes_table(record: dict[str, Any]) -> Table:
    """A row per home and width, a column per length."""
    rows = record["lengths"]
    table = simple_table(
        "KV lies on", *(f"{row['cached_tokens']:,} tokens,\nms" for row in rows), above=title(record)
    )
    for name in rows[0]["homes"]:
        home, bits = name.split()
        cells = (row["homes"][name]["ttft_ms"] for row in rows)
        table.add_row(
            f"{home}, {bits} bits", *(f"{c['median']:.1f} ({c['low']:.1f}-{c['high']:.1f})" for c in cells)
        )
    table.add_row("one bare copy from the host", *(f"{row['bare_copy_ms']['median']:.1f}" for row in rows))
    return table
