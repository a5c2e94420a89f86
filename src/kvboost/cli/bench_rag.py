"""`kvboost bench rag`: documents found again anywhere, and how fast.

Knows how the record is shown, not how it is measured.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import click
from rich.table import Column, Table

from kvboost.choices import SELECTORS
from kvboost.cli.bench_view import (
    bar,
    opened,
    prepare,
    read_names,
    read_shares,
    shared_options,
    show,
    simple_table,
    title,
)
from kvboost.cli.options import GroupedCommand, engine_options, setting

COMPARED = (
    "recompute_strategy",
    "recompute_ratio",
    "max_kl",
    "min_facts",
    "selector",
)  # engine options of ours
_COUNT_OR_NONE = click.IntRange(min=0)


@click.command(cls=GroupedCommand)
@setting("--documents", 8, "Per prompt.")
@setting("--prompt-tokens", 4_000, "Of all documents, about.")
@setting("--ratios", "0.10,0.15", "Recomputed shares.", str, callback=read_shares)
@setting(
    "--selectors",
    ",".join(SELECTORS),
    "How the recomputed tokens are chosen.",
    str,
    callback=functools.partial(read_names, SELECTORS),
)
@setting("--rounds", 5, "Orders, with a question each.")
@setting("--pairs", 15, "Prompts with nothing in common.", _COUNT_OR_NONE)
@setting("--cold-tokens", 1_000, "Length of these.")
@setting("--chats", 3, "Over reordered documents.", _COUNT_OR_NONE)
@setting("--turns", 5, "Per chat.")
@shared_options
@engine_options
def rag(
    model: str, out: Path | None, plot: bool, as_json: bool, engine_options: dict[str, Any], **options: Any
) -> None:
    """The first token when known documents come back in another order.

    In every round the documents have been read one by one and nothing else has; all contestants
    get the same new order and question. Then prompts that share nothing with the cache, where
    reuse can only lose; and a chat over reordered documents, next to the same chat with exact hits.
    All times are wall time from the call to the first token. About ten minutes with the default
    settings on two slow cores.

    \b
    kvboost bench rag --out results
    kvboost bench rag --documents 4 --prompt-tokens 1000 --rounds 3 --pairs 0 --chats 0
    """
    from kvboost.bench import plots
    from kvboost.bench.rag import RagSettings, run

    settings = RagSettings(**options)
    prepare(out, plot=plot)
    with opened(model, engine_options, COMPARED) as (engine, open_engine), bar() as report:
        record = run(engine, model, settings, open_engine, report)
    tables: list[Table | str] = [rag_table(record), wrong_guess_line(record), chat_table(record)]
    show(record, [] if as_json else tables, out, plots.plot_first_tokens if plot else None)


def rag_table(record: dict[str, Any]) -> Table:
    """A row per contestant."""
    headings = ("speed-\nup", "cached", "recom-\nputed", "same first\ntoken")
    table = simple_table(
        Column("", no_wrap=True), "first token, ms\nmedian (range)", *headings, above=title(record)
    )
    for name, outcome in record["contestants"].items():
        times = outcome["ttft_ms"]
        table.add_row(
            name,
            f"{times['median']:,.0f} ({times['low']:,.0f}-{times['high']:,.0f})",
            f"{outcome['speedup']:.2f}",
            f"{outcome['cached_share']:.1%}",
            f"{outcome['recomputed_share']:.1%}",
            f"{outcome['same_first_token']}/{outcome['rounds']}",
        )
    return table


def wrong_guess_line(record: dict[str, Any]) -> str:
    """What reuse costs where there is nothing to reuse, in a sentence."""
    guess = record["wrong_guess"]
    if guess is None:
        return "Nothing in common: not measured."
    return (
        f"Nothing in common: {guess['prompt_tokens']:,} tokens, first token after "
        f"{guess['ttft_ms']['median']:,.0f} ms with the cache and "
        f"{guess['baseline_ttft_ms']['median']:,.0f} ms without "
        f"({guess['ratio_of_medians']:.3f} x, {guess['pairs']} pairs)."
    )


def chat_table(record: dict[str, Any]) -> Table:
    """A row per turn: over reordered documents, and with exact hits."""
    headings = ("tokens", "reordered,\nms", "repaired\ntokens", "approximate\ntokens", "exact hits,\nms", "x")
    table = simple_table("chat: turn", *headings)
    for turn in record["chat"] or ():
        ours, exact = turn["approximate"], turn["exact"]
        table.add_row(
            str(turn["turn"]),
            f"{ours['prompt_tokens']:,}",
            f"{ours['ttft_ms']['median']:,.0f}",
            f"{ours['recomputed_tokens']:,}",
            f"{ours['origins']['approximate']:,}",
            f"{exact['ttft_ms']['median']:,.0f}",
            f"{ours['ttft_ms']['median'] / exact['ttft_ms']['median']:.2f}",
        )
    return table
