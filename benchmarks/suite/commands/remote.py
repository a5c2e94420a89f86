"""`kvboost bench remote`: answers out of a shared store, and reading there against the bare store.

Knows how the record is shown, not how it is measured.
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
)
from kvboost.cli.options import COUNT, GroupedCommand, engine_options, model_option, setting

COMPARED = ("remote_cache", "remote_write", "cache_salt", "max_chunks")


@click.command(cls=GroupedCommand)
@click.option(
    "--address", required=True, help="Of a store that runs: redis://host:6379, s3://bucket/prefix, ..."
)
@click.option("--server", default="", help="What the store is, for the record: Redis 8.0, for one.")
@click.option(
    "--lengths", default="1024,4096", show_default=True, callback=read_counts, help="Tokens of the texts."
)
@setting("--rounds", 5, "Of answers and reads.", COUNT)
@setting("--plain-rounds", 2, "Of BASELINE.", COUNT)
@model_option
@setting("--seed", 0, "Of the texts.", int)
@out_option
@json_line
@engine_options
def remote(
    address: str,
    server: str,
    lengths: tuple[int, ...],
    rounds: int,
    plain_rounds: int,
    model: str,
    seed: int,
    out: Path | None,
    as_json: bool,
    engine_options: dict[str, Any],
) -> None:
    """The first token of a fresh engine out of a store that machines share, and how fast it reads there.

    What is written to the store is deleted at the end.

    \b
    kvboost bench remote --address redis://localhost:6379 --out results
    kvboost bench remote --address "s3://bucket?endpoint=http://localhost:9000" --kv-cache-bits 8
    """
    from benchmarks.suite.remote import RemoteSettings, run

    settings = RemoteSettings(lengths, rounds, plain_rounds, seed, server)
    prepare(out)
    with opened(model, engine_options, COMPARED) as (engine, open_engine), bar() as report:
        record = run(engine, model, settings, address, open_engine, report)
    tables = [] if as_json else [answers_table(record["lengths"]), reading_table(record["lengths"])]
    show(record, tables, out)


def answers_table(lengths: list[dict[str, Any]]) -> Table:
    """A row per length: the times to the first token."""
    table = simple_table("tokens", "BASELINE", "out of RAM", "out of the store", "sooner")
    for row in lengths:
        times = [row["ttft_ms"][who]["median"] for who in ("baseline", "ram", "remote")]
        cells = [f"{time:,.0f} ms" for time in times]
        table.add_row(f"{row['tokens']:,}", *cells, f"{row['speedup']:.1f} x")
    return table


def reading_table(lengths: list[dict[str, Any]]) -> Table:
    """A row per length: how fast it is read."""
    table = simple_table("tokens", "size", "read", "bare GET", "ratio", "trips of a look-up")
    for row in lengths:
        table.add_row(
            f"{row['tokens']:,}",
            f"{row['bytes'] / 1e6:,.0f} MB",
            f"{row['read_gb_s']:.2f} GB/s",
            f"{row['bare_gb_s']:.2f} GB/s",
            f"{row['read_of_bare']:.2f} x",
            str(row["lookup_trips"]),
        )
    return table
