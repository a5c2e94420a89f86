"""`kvboost bench evaluation`: a task of lm_eval by its own model and by kvboost.

Knows how the record is shown, not how it is measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.table import Table

from kvboost.cli.bench_view import bar, opened, prepare, read_counts, show, simple_table
from kvboost.cli.options import GroupedCommand, engine_options

_COUNT = click.IntRange(min=1)


@click.command(cls=GroupedCommand)
@click.option("--questions", type=_COUNT, default=40, show_default=True, help="Of four choices each.")
@click.option(
    "--shots",
    type=click.IntRange(min=0),
    default=5,
    show_default=True,
    help="Examples before every question.",
)
@click.option(
    "--passage-tokens",
    type=click.IntRange(min=8),
    default=24,
    show_default=True,
    help="Text before each question.",
)
@click.option(
    "--batch-sizes",
    default="8,1",
    show_default=True,
    callback=read_counts,
    help="Of lm_eval's own model; the fastest is compared with.",
)
@click.option("--rounds", type=_COUNT, default=5, show_default=True, help="Runs of kvboost.")
@click.option("--plain-rounds", type=_COUNT, default=2, show_default=True, help="Of lm_eval's own model.")
@click.option("--model", default="builtin", show_default=True, help='A hub name, a folder, or "builtin".')
@click.option("--seed", type=int, default=0, show_default=True, help="Of the questions.")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Also write the JSON into this folder."
)
@click.option("--json", "as_json", is_flag=True, help="Print only the line of JSON.")
@engine_options
def evaluation(
    questions: int,
    shots: int,
    passage_tokens: int,
    batch_sizes: tuple[int, ...],
    rounds: int,
    plain_rounds: int,
    model: str,
    seed: int,
    out: Path | None,
    as_json: bool,
    engine_options: dict[str, Any],
) -> None:
    """A few-shot multiple-choice task through lm_eval: its own "hf" model against kvboost.

    Everybody runs the same questions on the same weights, in turns; kvboost starts from an empty cache
    every time. Needs `pip install kvboost[eval]`. Takes some minutes with the default settings.

    \b
    kvboost bench evaluation --out results
    kvboost bench evaluation --questions 10 --rounds 1
    """
    from benchmarks.suite.evaluation import measure, require_lm_eval

    require_lm_eval()
    prepare(out)
    with opened(model, engine_options, ()) as (engine, _), bar() as report:
        record = measure(
            engine,
            model=model,
            questions=questions,
            shots=shots,
            passage_tokens=passage_tokens,
            batch_sizes=batch_sizes,
            rounds=rounds,
            plain_rounds=plain_rounds,
            seed=seed,
            report=report,
        )
    show(record, [] if as_json else [evaluation_table(record), agreement_line(record)], out)


def evaluation_table(record: dict[str, Any]) -> Table:
    """A row per contestant: seconds of a whole run, and what the task says of the model."""
    table = simple_table("")
    for heading in ("seconds, median (range)", "x kvboost", "acc", "acc_norm"):
        table.add_column(heading, justify="right", no_wrap=True)
    contestants = record["results"]["contestants"]
    fastest = contestants["kvboost"]["seconds"]["median"]
    for name, outcome in contestants.items():
        seconds = outcome["seconds"]
        table.add_row(
            name,
            f"{seconds['median']:.1f} ({seconds['low']:.1f}-{seconds['high']:.1f})",
            f"{seconds['median'] / fastest:.2f}",
            *(f"{outcome['metrics'][f'{metric},none']:.3f}" for metric in ("acc", "acc_norm")),
        )
    return table


def agreement_line(record: dict[str, Any]) -> str:
    """How far the scores lie apart, in a sentence."""
    results = record["results"]
    verdict = "agree" if results["same_scores"] else "do NOT agree"
    return (
        f"All {results['requests']} log-likelihoods {verdict}: "
        f"the largest difference is {results['largest_difference']:.1g}."
    )
