"""`kvboost bench batch`: prompts that share a beginning, together and otherwise.

Knows how the record is shown, not how it is measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.table import Table

from kvboost.cli.bench_view import bar, opened, prepare, show, simple_table, title
from kvboost.cli.options import GroupedCommand, engine_options

_COUNT = click.IntRange(min=1)
COMPARED = ("max_chunks",)
NAMES = {
    "hugging_face": "Hugging Face, padded batch",
    "continuous": "  its continuous batching",
    "expanded": "prefix copied for every row",
    "one_by_one": "kvboost, one by one",
    "batch": "kvboost, together",
    "batch_cold": "  prefix not read before",
}


@click.command(cls=GroupedCommand)
@click.option(
    "--batch", type=_COUNT, default=8, show_default=True, help="Prompts that are answered together."
)
@click.option("--prefixes", type=_COUNT, default=1, show_default=True, help="Beginnings that are shared.")
@click.option("--prefix-tokens", type=_COUNT, default=2_000, show_default=True, help="Shared beginning.")
@click.option(
    "--shortest-tail", type=_COUNT, default=5, show_default=True, help="Tokens behind it, at least."
)
@click.option(
    "--longest-tail", type=_COUNT, default=200, show_default=True, help="Tokens behind it, at most."
)
@click.option("--new-tokens", type=_COUNT, default=16, show_default=True, help="Length of the answers.")
@click.option("--rounds", type=_COUNT, default=5, show_default=True, help="Each with fresh tails.")
@click.option(
    "--plain-rounds", type=_COUNT, default=2, show_default=True, help="Rounds of those that are slow."
)
@click.option(
    "--memory-batch",
    type=_COUNT,
    default=16,
    show_default=True,
    help="Rows whose KV is weighed, at least --batch.",
)
@click.option("--model", default="builtin", show_default=True, help='A hub name, a folder, or "builtin".')
@click.option("--seed", type=int, default=0, show_default=True, help="Of the lengths of the tails.")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Also write the JSON into this folder."
)
@click.option("--json", "as_json", is_flag=True, help="Print only the line of JSON.")
@engine_options
def batch(
    batch: int,
    prefixes: int,
    prefix_tokens: int,
    shortest_tail: int,
    longest_tail: int,
    new_tokens: int,
    rounds: int,
    plain_rounds: int,
    memory_batch: int,
    model: str,
    seed: int,
    out: Path | None,
    as_json: bool,
    engine_options: dict[str, Any],
) -> None:
    """Prompts with one long beginning: answered together, one by one, and by Hugging Face's own batches.

    All answer the same prompts, in turns, in one process; tails are new in every round. "prefix copied for
    every row" is what batches cost where attention cannot share a prefix.

    \b
    kvboost bench batch --out results
    kvboost bench batch --batch 16 --prefix-tokens 1000 --rounds 3
    """
    from benchmarks.suite.batch import BatchSettings, run

    if prefixes > batch:
        raise click.UsageError("--prefixes must be at most --batch")
    if shortest_tail > longest_tail:
        raise click.UsageError("--shortest-tail must be at most --longest-tail")
    settings = BatchSettings(
        batch,
        prefixes,
        prefix_tokens,
        shortest_tail,
        longest_tail,
        new_tokens,
        rounds,
        min(plain_rounds, rounds),
        memory_batch,
        seed,
    )
    prepare(out)
    with opened(model, engine_options, COMPARED) as (engine, _), bar() as report:
        record = run(engine, model, settings, report)
    show(record, [] if as_json else [title(record), batch_table(record), memory_line(record)], out)


def batch_table(record: dict[str, Any]) -> Table:
    """Throughput of every way, and how many answers are those of `generate`."""
    table = simple_table("")
    for heading in ("prompts/s", "seconds\nmedian (range)", "x Hugging\nFace", "same\nanswers"):
        table.add_column(heading, justify="right", no_wrap=True)
    base = record["results"]["hugging_face"]["prompts_per_s"]
    for name, found in record["results"].items():
        seconds = found["seconds"]
        table.add_row(
            NAMES[name],
            f"{found['prompts_per_s']:.2f}",
            f"{seconds['median']:.1f} ({seconds['low']:.1f}-{seconds['high']:.1f})",
            f"{found['prompts_per_s'] / base:.1f}",
            f"{found['same_answers']}/{found['answers']}",
        )
    return table


def memory_line(record: dict[str, Any]) -> str:
    """What the KV of a batch takes, in a sentence."""
    memory = record["memory"]
    return (
        f"KV of {memory['rows']} rows over {record['settings']['prefix_tokens']:,} shared tokens: "
        f"{memory['kv_bytes'] / 1e6:,.0f} MB; with the prefix copied for every row "
        f"{memory['kv_bytes_expanded'] / 1e6:,.0f} MB ({memory['ratio']:.2f} x)."
    )
