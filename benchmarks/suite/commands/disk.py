"""`kvboost bench disk`: the disk tier against the disk itself, and an answer from disk against BASELINE.

Knows how the record is shown, not how it is measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.table import Table

from kvboost.cli.bench_view import bar, opened, prepare, show, simple_table
from kvboost.cli.options import GroupedCommand, engine_options

_COUNT = click.IntRange(min=1)
COMPARED = ("disk_cache_dir", "disk_cache_bytes", "max_chunks")


@click.command(cls=GroupedCommand)
@click.option("--tokens", type=_COUNT, default=4_096, show_default=True, help="Cached tokens.")
@click.option("--rounds", type=_COUNT, default=5, show_default=True, help="Of reads, writes and answers.")
@click.option("--plain-rounds", type=_COUNT, default=2, show_default=True, help="Of BASELINE.")
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where the disk is that should be measured. [default: the system's folder for temporary files]",
)
@click.option("--model", default="builtin", show_default=True, help='A hub name, a folder, or "builtin".')
@click.option("--seed", type=int, default=0, show_default=True, help="Of the text.")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Also write the JSON into this folder."
)
@click.option("--json", "as_json", is_flag=True, help="Print only the line of JSON.")
@engine_options
def disk(
    tokens: int,
    rounds: int,
    plain_rounds: int,
    folder: Path | None,
    model: str,
    seed: int,
    out: Path | None,
    as_json: bool,
    engine_options: dict[str, Any],
) -> None:
    """Reading and writing chunks on disk, and the first token of a fresh engine from there.

    Every chunk that is read is compared with its checksum. Files are dropped from the page cache before.

    \b
    kvboost bench disk --out results
    kvboost bench disk --folder /mnt/fast --kv-cache-bits 8
    """
    from benchmarks.suite.disk import DiskSettings, run

    settings = DiskSettings(tokens, rounds, plain_rounds, seed)
    prepare(out)
    with opened(model, engine_options, COMPARED) as (engine, open_engine), bar() as report:
        record = run(engine, model, settings, open_engine, folder, report)
    show(record, [] if as_json else [disk_table(record["results"])], out)


def disk_table(results: dict[str, Any]) -> Table:
    """Speeds of the tier and of the disk, and the time to the first token."""
    table = simple_table("")
    for heading in ("with the tier", "without", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    for kind in ("read", "write"):
        table.add_row(
            f"{kind}, {results['payload_bytes'] / 1e6:,.0f} MB",
            f"{results[f'{kind}_gb_s']:.2f} GB/s",
            f"{results[f'plain_{kind}_gb_s']:.2f} GB/s",
            f"{results[f'{kind}_of_plain']:.2f} x",
        )
    ttft = results["ttft_ms"]
    table.add_row(
        "first token",
        f"{ttft['disk']['median']:,.0f} ms",
        f"{ttft['baseline']['median']:,.0f} ms",
        f"{results['speedup']:.1f} x sooner",
    )
    return table
