"""The command line: `python -m kvboost.integrations.lm_eval`. Reads options and shows results, no more."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from kvboost.errors import KVBoostError
from kvboost.integrations.harness.api import handle_non_serializable
from kvboost.integrations.harness.tasks import evaluate

INTERRUPTED = 130


def _read_option(_context: Any, _parameter: Any, values: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE pairs; a value that is no JSON is taken as text."""
    options: dict[str, Any] = {}
    for pair in values:
        name, sign, value = pair.partition("=")
        if not sign or not name.isidentifier():
            raise click.BadParameter(f"expected NAME=VALUE, got {pair!r}")
        constant = {"none": "null", "true": "true", "false": "false"}.get(value.lower(), value)
        try:
            options[name] = json.loads(constant)
        except json.JSONDecodeError:
            options[name] = value
    return options


def _read_limit(_context: Any, _parameter: Any, value: float | None) -> int | float | None:
    return int(value) if value is not None and value == int(value) else value


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--model", default="builtin", show_default=True, help='A hub name, a folder, or "builtin".')
@click.option("--tasks", required=True, help="Names of tasks, with commas between them; * matches anything.")
@click.option(
    "--include-path",
    multiple=True,
    type=click.Path(exists=True, file_okay=False),
    help="A folder with task files of your own. May be given several times.",
)
@click.option(
    "--num-fewshot", type=click.IntRange(min=0), help="Examples before every question. [default: the task's]"
)
@click.option(
    "--limit",
    type=click.FloatRange(min=0, min_open=True),
    callback=_read_limit,
    help="So many questions of every task, or a share below 1.",
)
@click.option("--chat", is_flag=True, help="Put prompts into the model's chat template.")
@click.option("--system", metavar="TEXT", help="A system instruction.")
@click.option(
    "--gen-option",
    "gen_kwargs",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_read_option,
    help="Generation option of lm_eval, over the task's own, e.g. max_gen_toks=64.",
)
@click.option(
    "-o",
    "--option",
    "options",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_read_option,
    help="Option of the engine or of KVBoostLM, e.g. dtype=bfloat16, max_chunks=none, max_length=2048.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON instead of a table.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Also write the JSON here.")
@click.option("--log-samples", is_flag=True, help="Put every question with its answer into --output.")
@click.option("--verbose", is_flag=True, help="Show what lm_eval reports while it works.")
@click.option("--debug", is_flag=True, help="Show the stack trace of an error.")
def main(
    model: str,
    tasks: str,
    include_path: tuple[str, ...],
    num_fewshot: int | None,
    limit: int | float | None,
    chat: bool,
    system: str | None,
    gen_kwargs: dict[str, Any],
    options: dict[str, Any],
    as_json: bool,
    output: Path | None,
    log_samples: bool,
    verbose: bool,
    debug: bool,
) -> None:
    """Run tasks of lm-evaluation-harness on a kvboost engine.

    The scores are those of lm_eval's own "hf" model; the examples before the questions, and the question
    before its choices, are read once.

    \b
    python -m kvboost.integrations.lm_eval --tasks arc_easy --num-fewshot 5 --limit 100
    python -m kvboost.integrations.lm_eval --tasks mine --include-path tasks --json
    python -m kvboost.integrations.lm_eval --model Qwen/Qwen3-0.6B --tasks gsm8k --chat -o dtype=bfloat16
    """
    if log_samples and output is None:
        raise click.UsageError("--log-samples needs --output FILE")
    if output is not None and not output.absolute().parent.is_dir():
        raise click.UsageError(f"--output: there is no folder {output.absolute().parent}")
    try:
        with _quiet(verbose=verbose):
            results = evaluate(
                model,
                [name.strip() for name in tasks.split(",") if name.strip()],
                num_fewshot=num_fewshot,
                include_path=include_path or None,
                limit=limit,
                apply_chat_template=chat,
                system_instruction=system,
                gen_kwargs=gen_kwargs or None,
                log_samples=log_samples,
                **options,
            )
        text = json.dumps(results, default=handle_non_serializable, ensure_ascii=False)
        if output is not None:
            output.write_text(text + "\n", encoding="utf-8")
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        sys.exit(INTERRUPTED)
    except Exception as error:  # tasks, data sets and models raise what they like
        if debug:
            raise
        kind = "" if isinstance(error, KVBoostError | OSError) else f"{type(error).__name__}: "
        click.secho(f"error: {kind}{' '.join(str(error).split())}", fg="red", err=True)
        sys.exit(1)
    results.pop("samples", None)
    if as_json:
        click.echo(json.dumps(results, default=handle_non_serializable, ensure_ascii=False))
    else:
        _show(results)


@contextlib.contextmanager
def _quiet(*, verbose: bool) -> Iterator[None]:
    """Only what matters on stderr, unless more is asked for."""
    import datasets
    from transformers.utils import logging as transformers_logging

    if verbose:
        yield
        return
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)


def _show(results: dict[str, Any]) -> None:
    """A row per task and metric, and what was reused."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("task", overflow="fold")
    for heading in ("shots", "questions", "metric", "value", "stderr"):
        table.add_column(heading, justify="left" if heading == "metric" else "right", no_wrap=True)
    for name, values in {**results["results"], **results.get("groups", {})}.items():
        counts = results.get("n-samples", {}).get(name, {})
        cells = [str(results.get("n-shot", {}).get(name, "")), str(counts.get("effective", ""))]
        for metric, value in values.items():
            label, _, chosen = metric.partition(",")
            if label.endswith("_stderr") or not isinstance(value, float):
                continue
            error = values.get(f"{label}_stderr,{chosen}")
            shown = f"{error:.4f}" if isinstance(error, float) else ""
            label = label if chosen in ("", "none") else f"{label} ({chosen})"
            table.add_row(name, *cells, label, f"{value:.4f}", shown)
            name, cells = "", ["", ""]
    console = Console(highlight=False)
    console.print(table)
    reuse = results["kvboost"]
    console.print(
        f"{reuse['seconds']:,.1f} s; {reuse['cached_tokens']:,} of {reuse['prompt_tokens']:,} prompt tokens "
        "were not read again",
        markup=False,
    )
