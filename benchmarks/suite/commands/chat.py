"""`kvboost bench chat`: chats turn by turn, with and without reuse.

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


@click.command(cls=GroupedCommand)
@click.option("--chats", type=_COUNT, default=6, show_default=True, help="That go on at the same time.")
@click.option("--turns", type=_COUNT, default=6, show_default=True, help="Questions per chat.")
@click.option("--new-tokens", type=_COUNT, default=32, show_default=True, help="Length of the answers.")
@click.option("--document-words", type=_COUNT, default=300, show_default=True, help="A chat begins with.")
@click.option(
    "--baseline-chats", type=_COUNT, default=2, show_default=True, help="Chats that BASELINE answers too."
)
@click.option("--model", default="builtin", show_default=True, help='A hub name, a folder, or "builtin".')
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Also write the JSON into this folder."
)
@click.option("--json", "as_json", is_flag=True, help="Print only the line of JSON.")
@engine_options
def chat(
    chats: int,
    turns: int,
    new_tokens: int,
    document_words: int,
    baseline_chats: int,
    model: str,
    out: Path | None,
    as_json: bool,
    engine_options: dict[str, Any],
) -> None:
    """Chats about a document each, turn by turn: how long until the first token.

    Every turn sends the whole chat, as chat clients do, and the chats take turns with each other.

    \b
    kvboost bench chat --out results
    kvboost bench chat --chats 20 --turns 10 --max-cache-bytes 500MB
    """
    from benchmarks.suite.chat import ChatSettings, run

    settings = ChatSettings(chats, turns, new_tokens, document_words, min(baseline_chats, chats))
    prepare(out)
    with opened(model, engine_options, ()) as (engine, _), bar() as report:
        record = run(engine, model, settings, report)
    show(record, [] if as_json else [title(record), chat_table(record), same_line(record)], out)


def chat_table(record: dict[str, Any]) -> Table:
    """A row per turn."""
    table = simple_table("turn")
    for heading in (
        "prompt\ntokens",
        "from the\ncache",
        "first token, ms\nmedian (range)",
        "BASELINE",
        "sooner",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in record["results"]:
        ttft, plain = row["ttft_ms"], row["baseline_ttft_ms"]
        table.add_row(
            str(row["turn"]),
            f"{row['prompt_tokens']:,}",
            f"{row['cached_tokens']:,}",
            f"{ttft['median']:,.0f} ({ttft['low']:,.0f}-{ttft['high']:,.0f})",
            f"{plain['median']:,.0f}" if plain else "",
            f"{row['speedup']:.1f} x" if plain else "",
        )
    return table


def same_line(record: dict[str, Any]) -> str:
    """How many answers are those of BASELINE."""
    return f"{record['same_answers']} of {record['compared']} answers equal BASELINE's."
