"""`kvboost bench prefix`: a long beginning seen before, against plain generate and reuse by hand.

Knows how the record is shown, not how it is measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Column, Table

from kvboost.cli.bench_view import out_option, prepare, read_counts, show, simple_table, title
from kvboost.cli.options import GroupedCommand, engine_options, model_option, setting
from kvboost.cli.session import opened_engine, unlimited

NAMES = {"plain": "plain", "hand_made": "hand-made", "kvboost": "kvboost", "kvboost_copied": "  copied"}


@click.command(cls=GroupedCommand)
@model_option
@setting("--lengths", "1024,2048,4096", "Shared tokens, one measurement each.", str, callback=read_counts)
@setting("--rounds", 10, "Per length.")
@setting("--plain-rounds", 3, "Rounds in which plain generate, the slow one, takes part.")
@setting("--new-tokens", 32, "Length of the answers.", click.IntRange(min=2))
@setting("--pairs", 21, "Pairs for the cost of storing.")
@out_option
@engine_options
def prefix(model: str, out: Path | None, engine_options: dict[str, Any], **options: Any) -> None:
    """A long beginning seen before: plain generate, hand-made reuse, kvboost.

    All answer the same prompts, in turns, in one process: a shared beginning and 20 tokens that are
    new in every round. Hand-made reuse is a DynamicCache of the beginning, cropped back after each
    answer. "copied" is kvboost when the request before was about something else. The cache has no
    limit here unless you set one. Takes some minutes with the default settings.

    \b
    kvboost bench prefix
    kvboost bench prefix --lengths 1024 --rounds 5 --out results
    """
    from kvboost.bench.prefix import PrefixSettings, run

    prepare(out)
    settings = PrefixSettings(**options)
    progress = Console(stderr=True)
    with (
        opened_engine(model, unlimited(engine_options), progress) as engine,
        progress.status("starting") as status,
    ):
        record = run(engine, model, settings, status.update)
    show(record, [prefix_table(record), storing_line(record)], out)


def prefix_table(record: dict[str, Any]) -> Table:
    """A row per length and contestant: medians, for TTFT with the lowest and the highest."""
    table = simple_table(
        Column("shared", justify="right", no_wrap=True),
        Column("", no_wrap=True),
        "first token, ms\nmedian (range)",
        "x hand-\nmade",
        "x plain",
        "decode\ntok/s",
        "same\ntokens",
        above=title(record),
    )
    for item in record["lengths"]:
        contestants = item["contestants"]
        hand_made, plain = (contestants[name]["ttft_ms"]["median"] for name in ("hand_made", "plain"))
        for name, outcome in contestants.items():
            ttft = outcome["ttft_ms"]
            table.add_row(
                f"{item['shared_tokens']:,}" if name == "plain" else "",
                NAMES[name],
                f"{ttft['median']:,.0f} ({ttft['low']:,.0f}-{ttft['high']:,.0f})",
                f"{ttft['median'] / hand_made:.2f}",
                f"{ttft['median'] / plain:.3f}",
                f"{outcome['decode_tokens_per_s']['median']:.1f}",
                f"{outcome['same_tokens_as_plain']}/{outcome['compared_with_plain']}",
                end_section=name == "kvboost_copied",
            )
    return table


def storing_line(record: dict[str, Any]) -> str:
    """What storing costs before the first token, in a sentence."""
    storing = record["storing"]
    return (
        f"Storing: a cold prompt of {storing['prompt_tokens']} tokens, first token after "
        f"{storing['prefix_cache_ttft_ms']['median']:,.0f} ms with storing and "
        f"{storing['baseline_ttft_ms']['median']:,.0f} ms without "
        f"({storing['ratio_of_medians']:.3f} x, {storing['pairs']} pairs)."
    )
