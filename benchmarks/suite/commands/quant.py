"""`kvboost bench quant`: what 8 and 4 bits cost in error, bytes and time.

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
COMPARED = ("kv_cache_bits", "max_chunks")


@click.command(cls=GroupedCommand)
@click.option("--prompts", type=_COUNT, default=40, show_default=True, help="Prompts for the error.")
@click.option(
    "--cached-tokens",
    type=(_COUNT, _COUNT),
    default=(500, 3_000),
    show_default=True,
    help="The least and the most that is cached of a prompt.",
)
@click.option(
    "--continuation", type=_COUNT, default=32, show_default=True, help="Tokens over which the error is taken."
)
@click.option(
    "--ttft-tokens", type=_COUNT, default=4_096, show_default=True, help="Cached tokens of the timed prompt."
)
@click.option("--rounds", type=_COUNT, default=11, show_default=True, help="Timed requests per width.")
@click.option("--model", default="builtin", show_default=True, help='A hub name, a folder, or "builtin".')
@click.option("--seed", type=int, default=0, show_default=True, help="Of texts and questions.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Also write the JSON and a plot (SVG and PNG) into this folder.",
)
@click.option("--plot/--no-plot", default=True, show_default=True, help="With --out.")
@click.option("--json", "as_json", is_flag=True, help="Print only the line of JSON.")
@engine_options
def quant(
    prompts: int,
    cached_tokens: tuple[int, int],
    continuation: int,
    ttft_tokens: int,
    rounds: int,
    model: str,
    seed: int,
    out: Path | None,
    plot: bool,
    as_json: bool,
    engine_options: dict[str, Any],
) -> None:
    """Error, bytes and speed of cached KV with 8 and 4 bits, against KV as it was computed.

    Error is the mean KL divergence of the next tokens, over quantized KV of all but the question, from
    those over the same KV unquantized. Beside the widths that --kv-cache-bits takes it shows the ways
    that were not taken. About ten minutes on two slow cores.

    \b
    kvboost bench quant --out results
    kvboost bench quant --prompts 8 --rounds 3
    """
    from benchmarks.suite import plots
    from benchmarks.suite.quant import QuantSettings, run

    settings = QuantSettings(prompts, *cached_tokens, continuation, ttft_tokens, rounds, seed)
    settings.check()
    prepare(out, plot=plot)
    with opened(model, engine_options, COMPARED) as (engine, open_engine), bar() as report:
        record = run(engine, model, settings, open_engine, report)
    tables: list[Table | str] = [] if as_json else [widths_table(record), errors_table(record)]
    show(record, tables, out, plots.plot_bytes if plot else None)


def widths_table(record: dict[str, Any]) -> Table:
    """A row per width: bytes and speed."""
    table = simple_table("bits")
    for heading in ("bytes of\nfloat16", "first token,\nms", "of 16 bits", "store,\nGB/s", "load,\nGB/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for bits, width in record["widths"].items():
        table.add_row(
            bits,
            f"{width['bytes_of_float16']:.3f}",
            f"{width['ttft_ms']['median']:,.0f}",
            f"{width['ttft_ratio']:.2f} x",
            f"{width['store_gb_s']:.1f}",
            f"{width['load_gb_s']:.1f}",
        )
    return table


def errors_table(record: dict[str, Any]) -> Table:
    """A row per way to quantize: its error."""
    table = simple_table("how")
    for heading in ("mean KL (95%)", "median", "same top\ntoken"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, error in record["errors"].items():
        table.add_row(
            name,
            f"{error['kl_mean']:.5f} ({error['kl_mean_low']:.5f}-{error['kl_mean_high']:.5f})",
            f"{error['kl_median']:.5f}",
            f"{error['agreement']:.1%}",
        )
    return table
