"""`kvboost bench rag`: documents found again anywhere, and how fast.

Knows how the record is shown, not how it is measured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.table import Table

from kvboost.choices import SELECTORS
from kvboost.cli.bench_view import bar, opened, prepare, show, simple_table, title
from kvboost.cli.options import GroupedCommand, engine_options

COMPARED = (
    "recompute_strategy",
    "recompute_ratio",
    "max_kl",
    "selector",
)  # engine options with values of ours
_COUNT = click.IntRange(min=1)
_COUNT_OR_NONE = click.IntRange(min=0)


def read_shares(_context: click.Context, _option: click.Parameter, value: str) -> tuple[float, ...]:
    """A callback for options: `0.05,0.10` becomes (0.05, 0.1)."""
    try:
        shares = tuple(float(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"expected numbers with commas between them, got {value!r}") from None
    if not all(0 < share <= 1 for share in shares):
        raise click.BadParameter(f"every number must be above 0 and at most 1, got {value!r}")
    return tuple(dict.fromkeys(shares))


def read_names(
    allowed: tuple[str, ...], _context: click.Context, _option: click.Parameter, value: str
) -> tuple[str, ...]:
    """A callback for options: `guided,random`, each of them allowed."""
    names = tuple(dict.fromkeys(part.strip() for part in value.split(",")))
    for name in names:
        if name not in allowed:
            raise click.BadParameter(f"expected some of {', '.join(allowed)}, got {name!r}")
    return names


def shared_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What benchmarks of found documents take beside their own options and the engine's."""
    options = (
        click.option(
            "--model", default="builtin", show_default=True, help='A hub name, a folder, or "builtin".'
        ),
        click.option(
            "--seed", type=int, default=0, show_default=True, help="Of texts, orders and questions."
        ),
        click.option(
            "--out",
            type=click.Path(file_okay=False, path_type=Path),
            help="Also write the JSON and a plot (SVG and PNG) into this folder.",
        ),
        click.option("--plot/--no-plot", default=True, show_default=True, help="With --out."),
        click.option("--json", "as_json", is_flag=True, help="Print only the line of JSON."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command(cls=GroupedCommand)
@click.option("--documents", type=_COUNT, default=8, show_default=True, help="Per prompt.")
@click.option(
    "--prompt-tokens", type=_COUNT, default=4_000, show_default=True, help="Of all documents, about."
)
@click.option(
    "--ratios", default="0.10,0.15", show_default=True, callback=read_shares, help="Recomputed shares."
)
@click.option(
    "--selectors",
    default=",".join(SELECTORS),
    show_default=True,
    callback=functools.partial(read_names, SELECTORS),
    help="How the recomputed tokens are chosen.",
)
@click.option("--rounds", type=_COUNT, default=5, show_default=True, help="Orders, with a question each.")
@click.option(
    "--pairs", type=_COUNT_OR_NONE, default=15, show_default=True, help="Prompts with nothing in common."
)
@click.option("--cold-tokens", type=_COUNT, default=1_000, show_default=True, help="Length of these.")
@click.option("--chats", type=_COUNT_OR_NONE, default=3, show_default=True, help="Over reordered documents.")
@click.option("--turns", type=_COUNT, default=5, show_default=True, help="Per chat.")
@shared_options
@engine_options
def rag(
    documents: int,
    prompt_tokens: int,
    ratios: tuple[float, ...],
    selectors: tuple[str, ...],
    rounds: int,
    pairs: int,
    cold_tokens: int,
    chats: int,
    turns: int,
    model: str,
    seed: int,
    out: Path | None,
    plot: bool,
    as_json: bool,
    engine_options: dict[str, Any],
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

    settings = RagSettings(
        documents,
        prompt_tokens,
        ratios,
        selectors,
        rounds,
        pairs,
        cold_tokens,
        chats,
        turns,
        seed=seed,
    )
    prepare(out, plot=plot)
    with opened(model, engine_options, COMPARED) as (engine, open_engine), bar() as report:
        record = run(engine, model, settings, open_engine, report)
    tables: list[Table | str] = (
        [] if as_json else [rag_table(record), wrong_guess_line(record), chat_table(record)]
    )
    show(record, tables, out, plots.plot_first_tokens if plot else None)


def rag_table(record: dict[str, Any]) -> Table:
    """A row per contestant."""
    table = Table(title=title(record), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for heading in (
        "first token, ms\nmedian (range)",
        "speed-\nup",
        "cached",
        "recom-\nputed",
        "same first\ntoken",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
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
    table = simple_table("chat: turn")
    for heading in (
        "tokens",
        "reordered,\nms",
        "repaired\ntokens",
        "approximate\ntokens",
        "exact hits,\nms",
        "x",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
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
