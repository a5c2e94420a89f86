"""`kvboost bench encoding`: what overlap_k, sink_tokens and chunk_boundary_window do to the error.

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
COMPARED = ("overlap_k", "sink_tokens", "chunk_boundary_window")


@click.command(cls=GroupedCommand)
@click.option("--prompts", type=_COUNT, default=16, show_default=True, help="In all groups together.")
@click.option(
    "--prompt-tokens", type=_COUNT, default=1_500, show_default=True, help="Of all documents, about."
)
@click.option("--model", default="builtin", show_default=True, help='A hub name, a folder, or "builtin".')
@click.option("--seed", type=int, default=3, show_default=True, help="Of texts, orders and questions.")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Also write the JSON into this folder."
)
@click.option("--json", "as_json", is_flag=True, help="Print only the line of JSON.")
@engine_options
def encoding(
    prompts: int,
    prompt_tokens: int,
    model: str,
    seed: int,
    out: Path | None,
    as_json: bool,
    engine_options: dict[str, Any],
) -> None:
    """The error of reuse by how chunks are encoded.

    Each encoding reads the same texts and reuses them twice: as a prefix where they stood (exact by
    default, lossy with --overlap-k), and from documents cached one by one, repaired with guided at
    10%. Error is the mean KL divergence of the next tokens from those after full prefill.

    \b
    kvboost bench encoding --out results
    """
    from benchmarks.suite.encoding import EncodingSettings, run

    settings = EncodingSettings(prompts=prompts, prompt_tokens=prompt_tokens, seed=seed)
    prepare(out)
    with opened(model, engine_options, COMPARED) as (_, open_engine), bar() as report:
        record = run(open_engine, model, settings, report)
    show(record, [] if as_json else [encoding_table(record)], out)


def encoding_table(record: dict[str, Any]) -> Table:
    """A row per encoding."""
    table = simple_table("encoding")
    for heading in ("prefix,\nas it is", "prefix,\nrepaired", "tokens\nrepaired", "moved,\nguided 10%"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in record["results"]:
        options = ", ".join(f"{name}={value}" for name, value in result["encoding"].items())
        table.add_row(
            options or "default",
            f"{result['prefix']['kl_mean']:.4f}",
            f"{result['prefix_repaired']['kl_mean']:.4f}",
            f"{result['prefix_repaired']['recomputed_tokens']:,}",
            f"{result['moved']['kl_mean']:.4f}",
        )
    return table
