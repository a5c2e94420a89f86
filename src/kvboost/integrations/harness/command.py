"""Running lm_eval's tasks on an engine, from Python and from the command line.

`evaluate` finds tasks by name, and says with the results what was reused; the command
`python -m kvboost.integrations.lm_eval` reads options for it and shows results. Knows lm_eval's tasks and its
runner; what a request becomes is `model`'s business.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from kvboost.engine import InferenceEngine
from kvboost.errors import InvalidRequestError, KVBoostError
from kvboost.integrations.harness.api import handle_non_serializable
from kvboost.integrations.harness.model import KVBoostLM

INTERRUPTED = 130


def evaluate(
    model: str | InferenceEngine | KVBoostLM = "builtin",
    tasks: str | Sequence[str] = (),
    *,
    num_fewshot: int | None = None,
    include_path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    limit: int | float | None = None,
    apply_chat_template: bool = False,
    system_instruction: str | None = None,
    gen_kwargs: dict[str, Any] | None = None,
    log_samples: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Run lm_eval tasks and return its results, with `results["kvboost"]` on what was reused.

    `tasks` are names, or patterns such as "arc_*"; `include_path` is a folder with task files of your own.
    `options` are those of `KVBoostLM` and of the engine. As always with lm_eval, the seeds of `random`, numpy
    and torch are set.
    """
    from lm_eval import simple_evaluate

    started = time.perf_counter()
    _check_numbers(num_fewshot, limit)
    names, manager = _find_tasks(tasks, include_path)  # before a model is loaded
    if isinstance(model, KVBoostLM) and options:
        raise InvalidRequestError(f"{', '.join(options)}: options cannot be changed when the model is there")
    lm = model if isinstance(model, KVBoostLM) else KVBoostLM(model, **options)
    read, cached = lm.prompt_tokens, lm.cached_tokens
    try:
        results = simple_evaluate(
            model=lm,
            tasks=names,
            task_manager=manager,
            num_fewshot=num_fewshot,
            limit=limit,
            apply_chat_template=apply_chat_template,
            system_instruction=system_instruction,
            gen_kwargs=gen_kwargs,
            log_samples=log_samples,
        )
    finally:
        if lm is not model:
            lm.close()
    reuse = {
        "prompt_tokens": lm.prompt_tokens - read,
        "cached_tokens": lm.cached_tokens - cached,
        "seconds": round(time.perf_counter() - started, 3),
    }
    return {**results, "kvboost": reuse}


def _check_numbers(num_fewshot: Any, limit: Any) -> None:
    if num_fewshot is not None and (type(num_fewshot) is not int or num_fewshot < 0):
        raise InvalidRequestError(
            f"num_fewshot must be None or an integer of at least 0, got {num_fewshot!r}"
        )
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or limit <= 0):
        raise InvalidRequestError(
            f"limit must be None, a number of questions, or a share below 1, got {limit!r}"
        )


def _find_tasks(tasks: str | Sequence[str], include_path: Any) -> tuple[list[str], Any]:
    """The names that `tasks` mean, and lm_eval's task manager that knows them."""
    from lm_eval.tasks import TaskManager

    wanted = [tasks] if isinstance(tasks, str) else list(tasks)
    if not wanted:
        raise InvalidRequestError("tasks must name at least one task")
    folders = [include_path] if isinstance(include_path, str | os.PathLike) else list(include_path or ())
    for folder in folders:
        if not Path(folder).is_dir():
            raise InvalidRequestError(f"include_path must be a folder with task files, got {str(folder)!r}")
    paths = [str(folder) for folder in folders]
    own = TaskManager(include_path=paths, include_defaults=False) if paths else None
    if own is not None and all(name in own.all_subtasks for name in wanted):
        return wanted, own  # lm_eval's own thousands of task files take seconds to read
    manager = TaskManager(include_path=paths or None)
    found: list[str] = []
    for name in wanted:
        matches = [name] if Path(name).is_file() else manager.match_tasks([name])
        if not matches:
            where = f"lm_eval or {', '.join(paths)}" if paths else "lm_eval; your own need include_path"
            raise InvalidRequestError(f"there is no task {name!r} in {where}")
        found += [match for match in matches if match not in found]
    return found, manager


# --- the command line ------------------------------------------------------------------------------


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
