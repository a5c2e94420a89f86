"""`kvboost evaluate`: one's own questions and documents, in every mode and at several ratios.

Knows how the report is shown and kept; asking and judging are the engine's.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Column, Table

from kvboost.choices import GenerationMode
from kvboost.cli.bench_view import prepare, read_names, read_shares, simple_table, title
from kvboost.cli.options import GroupedCommand, engine_options_with, json_option, model_option, setting
from kvboost.cli.session import FOLDER, opened_engine, unlimited

if TYPE_CHECKING:
    from kvboost.proof.evaluation_report import EvaluationReport

MODES = tuple(mode.value for mode in GenerationMode)
NAME = "questions"  # of the files in --out; `bench evaluation` is about lm-evaluation-harness
ANSWERS = "answers.jsonl"
_COMPARED = dict.fromkeys(("recompute_ratio", "max_kl", "min_facts"), "use --ratios")


@click.command(cls=GroupedCommand)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE.jsonl")
@model_option
@setting("--ratios", "0.10,0.15,0.30", "Recomputed shares to try.", str, callback=read_shares)
@setting(
    "--modes",
    ",".join(MODES),
    "What is compared; baseline always takes part.",
    str,
    callback=functools.partial(read_names, MODES),
)
@setting("--max-new-tokens", 32, "Per answer.")
@setting(
    "--read",
    "alone",
    "How the documents were read before they are asked about: each by itself, or one behind the other.",
    click.Choice(("alone", "together")),
)
@click.option("--limit", type=click.IntRange(min=1), help="Ask only the first so many questions.")
@click.option(
    "--out",
    type=FOLDER,
    help="Keep every answer in this folder as it comes, so that the same command goes on where it was "
    "stopped; and write the report there, as JSON and as a plot (SVG and PNG).",
)
@click.option("--again", is_flag=True, help="With --out: ask everything again, whatever was kept there.")
@setting("--plot/--no-plot", True, "With --out.", None)
@json_option
@engine_options_with(max_chunks="no limit", recompute_ratio="see --ratios")
def evaluate(
    file: Path,
    model: str,
    limit: int | None,
    out: Path | None,
    again: bool,
    plot: bool,
    as_json: bool,
    engine_options: dict[str, Any],
    **options: Any,
) -> None:
    """Ask the questions of FILE.jsonl with and without reuse: which mode and ratio suit your documents?

    Every question stands over documents that were read before, in another order than its prompt has them.
    Shown per mode and ratio: right answers, how many of BASELINE's right answers were kept, the median time
    to the first token, what was reused and what of it was computed again; and what to use, in a sentence.
    Contestants take turns within each question, and find the same cache.

    A line of the file is a document, or a question over documents with what its answer has to be:

    \b
    {"id": "tariff", "document": "The tariff of the harbour ..."}
    {"documents": ["tariff", "rules"], "question": "...", "contains": "40 crowns"}
    {"documents": ["rules", "tariff"], "question": "...", "regex": "\\\\b19[0-9]{2}\\\\b"}
    {"documents": ["rules"], "question": "...", "choices": ["yes", "no"], "answer": "no"}

    "documents" has ids or whole texts; "contains" may be a list, of which one is enough; choices are taken
    by their likelihood. "system" and "id" may be added. All lines are checked before anything is asked.

    \b
    kvboost evaluate questions.jsonl --model builtin --out results
    kvboost evaluate questions.jsonl --modes prefix_cache,chunk_kv_reuse --ratios 0.05,0.15 --limit 20
    """
    for name, instead in _COMPARED.items():
        if name in engine_options:
            flag = "--" + name.replace("_", "-")
            raise click.UsageError(f"{flag} is what this command compares: {instead}")
    prepare(out, plot=plot)

    from kvboost.bench.record import head_of
    from kvboost.proof.evaluation_settings import EvaluationSettings
    from kvboost.proof.questions import read_questions

    questions = read_questions(file)[:limit]  # before the model is loaded: a bad line is said at once
    settings = EvaluationSettings.checked(**options)
    console = None if as_json else Console(stderr=True)
    with opened_engine(model, unlimited(engine_options), console) as engine:
        head = head_of(NAME, engine, model, settings)
        results = None if out is None else out / ANSWERS
        if results is not None and again:
            results.unlink(missing_ok=True)
        report = engine.evaluate(questions, **options, results=results, progress=False if as_json else None)
    record = {**report.to_dict(), **head, "file": file.name, "limit": limit}
    paths = _written(record, out, plot=plot) if out is not None else []
    if as_json:
        click.echo(json.dumps(record))
        return
    _show(report, record)
    if paths:
        click.echo(f"written to {', '.join(map(str, paths))}")


def _written(record: dict[str, Any], out: Path, *, plot: bool) -> list[Path]:
    from kvboost.bench import plots
    from kvboost.bench.record import write_record

    return [write_record(record, out), *(plots.plot_right_answers(record, out) if plot else [])]


def _show(report: EvaluationReport, record: dict[str, Any]) -> None:
    console = Console(highlight=False)
    console.print(title(record), markup=False)
    console.print(report.title.partition(";")[0], markup=False)
    console.print(rows_table(report))
    for row in report.rows:
        if row.lost:
            console.print(f"{row.name} lost: {', '.join(row.lost)}", markup=False)
    for text in (*report.notes, report.recommendation):
        console.print(text, markup=False)


def rows_table(report: EvaluationReport) -> Table:
    """A row per mode and ratio, within 80 columns."""
    headings = ("right", "kept", "first\ntoken, ms", "speed-\nup", "reused", "recom-\nputed")
    table = simple_table(Column("", no_wrap=True), *headings)
    for row in report.rows:
        table.add_row(*row.cells())
    return table
