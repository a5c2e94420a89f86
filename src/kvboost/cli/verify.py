"""`kvboost verify`: prove on one's own model that what is reused is right; the exit code is the verdict.

Knows how the report is shown, not how it is made.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Column, Table

from kvboost.cli.bench_view import bar, simple_table
from kvboost.cli.options import GroupedCommand, engine_options_with, json_option, setting
from kvboost.cli.session import opened_engine, unlimited
from kvboost.errors import InvalidRequestError

if TYPE_CHECKING:
    from kvboost.proof.verify import CorrectnessReport

MODES = ("prefix_cache", "chunk_kv_reuse")
_WORDS = {True: "[green]passed[/green]", False: "[red]FAILED[/red]", None: "[dim]not tried[/dim]"}


@click.command(cls=GroupedCommand)
@click.argument("model")
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Prompts to ask: a text file with one per line, or JSON lines of texts or messages. "
    "[default: one of our own]",
)
@setting("--max-new-tokens", 32, "Per answer.")
@setting("--mode", MODES[0], "Which reuse the answers are compared with.", click.Choice(MODES))
@json_option
@engine_options_with(max_chunks="no limit")
def verify(
    model: str, prompts: Path | None, as_json: bool, engine_options: dict[str, Any], **options: Any
) -> None:
    """Check that what kvboost reuses with MODEL is right. Exits 0 if it is, and 1 if not.

    Prompts are answered with reuse and by the model's own generate, and have to agree token for token.
    Then every part is compared with the stock model: attention, positions, layers, what is stored, moved
    keys, quantized and approximate reuse within their bounds, batches, bit-exactness. What fails is named.

    \b
    kvboost verify builtin
    kvboost verify ./my-model --prompts questions.txt --kv-cache-bits 8
    """
    asked = read_prompts(prompts) if prompts is not None else None
    console = None if as_json else Console(stderr=True)
    with opened_engine(model, unlimited(engine_options), console) as engine:
        if as_json:
            report = engine.verify_correctness(asked, **options)
        else:
            with bar() as tell:
                report = engine.verify_correctness(asked, **options, report=tell)
    if as_json:
        click.echo(json.dumps(report.to_dict()))
    else:
        _show(report)
    if not report.passed:
        raise SystemExit(1)


def read_prompts(path: Path) -> list[Any]:
    """The prompts of a file: JSON lines where the name or the first line says so, else lines of text."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{path} is not UTF-8 text ({error})") from error
    if not lines:
        raise InvalidRequestError(f"{path} has no prompts; write one per line")
    if path.suffix not in (".json", ".jsonl"):
        return lines
    return [_parsed(line, number, path) for number, line in enumerate(lines, 1)]


def _parsed(line: str, number: int, path: Path) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise InvalidRequestError(f"line {number} of {path} is no JSON ({error})") from error


def _show(report: CorrectnessReport) -> None:
    console = Console(highlight=False)
    console.print(_prompts_table(report))
    table = simple_table("", Column("", no_wrap=True), Column("", overflow="fold"))
    for verdict in report.verdicts:
        bound = "" if verdict.bound is None else f"; bound on the KL: {verdict.bound:g}"
        table.add_row(f"{verdict.kind} reuse", _WORDS[verdict.passed], f"{verdict.detail}{bound}")
    table.add_section()
    for check in report.checks:
        table.add_row(f"  {check.name}", _WORDS[check.passed], check.detail)
    console.print(table)
    equal = sum(prompt.same_tokens for prompt in report.prompts)
    console.print(
        f"{equal} of {len(report.prompts)} answers equal BASELINE's; {report.model}, {report.dtype}, "
        f"{report.device}, {report.seconds:.0f} s"
    )
    if report.passed:
        console.print("[green]verified[/green]")
    else:
        names = ", ".join(report.failed) or "the answers differ"
        console.print(f"[red]NOT verified[/red]: {names}")


def _prompts_table(report: CorrectnessReport) -> Table:
    table = simple_table(
        "prompt",
        "tokens",
        "reused",
        "same\nanswer",
        "KL, first\ntoken",
        "largest logit\ndifference",
        "agree-\nment",
    )
    for prompt in report.prompts:
        same = "yes" if prompt.same_tokens else f"differs at {prompt.first_difference}"
        table.add_row(
            prompt.prompt,
            f"{prompt.prompt_tokens:,}",
            f"{prompt.reuse_share:.0%}",
            same,
            f"{prompt.kl:.1e}",
            f"{prompt.largest_logit_difference:.1e}",
            f"{prompt.agreement:.0%}",
        )
    return table
