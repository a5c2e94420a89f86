"""`kvboost bench lookup` and `kvboost bench eviction`: the store alone, without a model.

Knows how their records are shown, not how they are measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from kvboost.cli.bench_view import prepare, read_counts, show, simple_table, targets_table

OUT = click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Also write the JSON into this folder."
)


@click.command()
@click.option(
    "--sizes",
    default="1000,10000,100000",
    show_default=True,
    callback=read_counts,
    help="Stored chunks, one measurement each.",
)
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=100_000, show_default=True)
@click.option(
    "--chunk-size", type=click.IntRange(min=1), default=128, show_default=True, help="Tokens per chunk."
)
@click.option("--rounds", type=click.IntRange(min=1), default=15, show_default=True, help="Per store.")
@OUT
def lookup(
    sizes: tuple[int, ...], prompt_tokens: int, chunk_size: int, rounds: int, out: Path | None
) -> None:
    """How long finding a long prompt takes, with little and with much stored.

    The prompt is stored in full, among other texts: separate ones, or continuations of the prompt's first
    chunk. A look-up is everything a request does with the store before it runs; the hashes are
    needed when a prompt is stored. No model; about a minute and 3 GB of RAM with the default settings.

    \b
    kvboost bench lookup
    kvboost bench lookup --sizes 1000,50000 --out results
    """
    from benchmarks.suite.lookup import LookupSettings, run

    settings = LookupSettings(sizes, prompt_tokens, chunk_size, rounds)
    settings.check()
    prepare(out)
    with Console(stderr=True).status("starting") as status:
        record = run(settings, status.update)
    show(record, [lookup_title(record), lookup_table(record)], out)


def lookup_title(record: dict[str, Any]) -> str:
    """What was looked up, and what the parts cost that do not depend on the store."""
    settings, pieces = record["settings"], record["pieces_ms"]
    return (
        f"Finding a prompt of {settings['prompt_tokens']:,} tokens in chunks of {settings['chunk_size']}, "
        f"{record['machine']['cpu']}. Ids to bytes: {pieces['bytes']['median']:.2f} ms, inside the look-up; "
        f"hashes of all {record['prompt_chunks']:,} chunks, as for storing: "
        f"{pieces['hashes']['median']:.2f} ms."
    )


def lookup_table(record: dict[str, Any]) -> Table:
    """A row per store."""
    table = simple_table("stored among")
    for heading in (
        "chunks",
        "look-up, ms\nmedian (range)",
        "with\nhashes, ms",
        "filling, µs\nper chunk",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for shape in dict.fromkeys(store["shape"] for store in record["stores"]):
        table.add_section()
        for store in record["stores"]:
            if store["shape"] == shape:
                times = store["lookup_ms"]
                table.add_row(
                    shape,
                    f"{store['chunks']:,}",
                    f"{times['median']:.1f} ({times['low']:.1f}-{times['high']:.1f})",
                    f"{store['total_ms']:.1f}",
                    f"{store['fill_us_per_chunk']:,.0f}",
                )
    return table


@click.command()
@click.option("--chats", type=click.IntRange(min=1), default=300, show_default=True, help="Per replay.")
@click.option(
    "--open-chats",
    default="20,100,300",
    show_default=True,
    callback=read_counts,
    help="Chats that go on at the same time, one measurement each.",
)
@click.option(
    "--seeds",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Replays with different chats, per measurement.",
)
@click.option(
    "--budget",
    type=click.FloatRange(min=0, max=1, min_open=True),
    default=0.3,
    show_default=True,
    help="As a share of what a store without a limit holds in the end.",
)
@OUT
def eviction(chats: int, open_chats: tuple[int, ...], seeds: int, budget: float, out: Path | None) -> None:
    """How many tokens of many chats a store with little room still serves.

    Chats of 3 to 8 turns whose turns interleave; system prompts and users have Zipf popularity. Compared
    with plain LRU, with the best fixed set of chunks chosen after the fact, and with no limit. No
    model; about two minutes with the default settings.

    \b
    kvboost bench eviction
    kvboost bench eviction --open-chats 50 --budget 0.1
    """
    from benchmarks.suite.chats import ChatSettings
    from benchmarks.suite.eviction import EvictionSettings, run

    prepare(out)
    settings = EvictionSettings(ChatSettings(chats), open_chats, tuple(range(seeds)), budget)
    with Console(stderr=True).status("starting") as status:
        record = run(settings, status.update)
    targets = [
        {**target, "name": f"{target['name']}, {level['open_chats']} at a time"}
        for level in record["levels"]
        for target in level["targets"]
    ]
    show(record, [eviction_title(record), eviction_table(record), targets_table(targets)], out)


def eviction_title(record: dict[str, Any]) -> str:
    """What was replayed."""
    settings = record["settings"]
    return (
        f"{len(settings['seeds'])} replays of {settings['chats']['chats']} chats with "
        f"{settings['budget_share']:.0%} of the room that a store without a limit takes in the end."
    )


def eviction_table(record: dict[str, Any]) -> Table:
    """A row per contestant and number of chats at a time."""
    table = simple_table("chats at a time")
    table.add_column("", no_wrap=True)
    table.add_column("reused share of prompt\ntokens, mean (range)", justify="right", no_wrap=True)
    for level in record["levels"]:
        table.add_section()
        for number, (name, share) in enumerate(level["hit_share"].items()):
            table.add_row(
                "" if number else str(level["open_chats"]),
                name,
                f"{share['mean']:.1%} ({share['low']:.1%}-{share['high']:.1%})",
            )
    return table
