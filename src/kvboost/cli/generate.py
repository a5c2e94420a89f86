"""`kvboost generate`: one answer from one prompt.

Knows where a prompt comes from and how an answer is shown; the rest is the engine's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from kvboost.cli.options import COUNT, GroupedCommand, engine_options_with, json_option, setting
from kvboost.cli.session import FOLDER, holds_cache, load_cache, opened_engine, unlimited, warnings_afterwards

if TYPE_CHECKING:
    from kvboost.engine import InferenceEngine
    from kvboost.models import GenerationResult
    from kvboost.requests.prompts import Prompt

MODES = ("chunk_kv_reuse", "prefix_cache", "baseline")
WITHOUT_CACHE = "baseline"


@click.command(cls=GroupedCommand)
@click.argument("model")
@click.argument("prompt", required=False)
@click.option(
    "--prompt-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Read the prompt from a UTF-8 text file.",
)
@click.option("--chat", is_flag=True, help="Treat the prompt as a user's message (chat template).")
@click.option("--max-new-tokens", type=COUNT, default=64, show_default=True)
@setting("--mode", MODES[0], "What is reused.", click.Choice(MODES))
@click.option("--do-sample", is_flag=True, help="Draw tokens instead of taking the likeliest.")
@click.option("--temperature", type=float, default=None, help="With --do-sample.  [default: 1.0]")
@click.option("--seed", type=click.IntRange(min=0), default=None, help="Draw the same tokens every time.")
@click.option(
    "--cache",
    type=FOLDER,
    help="Folder of a saved cache: loaded first if there is one, saved after the answer. Has no limit of "
    "chunks unless you set one; mode baseline neither reads nor writes it.",
)
@json_option
@engine_options_with(max_chunks="128; with --cache no limit")
def generate(
    model: str,
    prompt: str | None,
    prompt_file: Path | None,
    chat: bool,
    mode: str,
    temperature: float | None,
    cache: Path | None,
    as_json: bool,
    engine_options: dict[str, Any],
    **options: Any,
) -> None:
    """Answer PROMPT with MODEL: a hub name, a folder, or "builtin".

    The answer goes to stdout, a line about time and reuse to stderr. PROMPT may be "-" for stdin;
    one line break at the end of stdin or of a file is not part of the prompt.

    \b
    kvboost generate builtin "The capital of France is" --max-new-tokens 8
    kvboost generate builtin --chat "Name three rivers."
    cat notes.txt | kvboost generate ./my-model - --dtype bfloat16
    """
    text = read_prompt(prompt, prompt_file)
    if temperature is not None and not options["do_sample"]:
        raise click.UsageError("--temperature has an effect only with --do-sample")
    options |= {"mode": mode, "temperature": 1.0 if temperature is None else temperature}
    request = as_prompt(text, chat=chat)
    if mode == WITHOUT_CACHE:
        cache = None
    known = cache is not None and holds_cache(cache)
    engine_options = engine_options if cache is None else unlimited(engine_options)
    progress = False if as_json else None
    with opened_engine(model, engine_options, None if as_json else Console(stderr=True)) as engine:
        if cache is not None and known:
            load_cache(engine, cache, progress=progress)
        if as_json:
            result = engine.generate(request, **options)
            click.echo(json.dumps({"model": model, **result.to_dict()}))
        else:
            click.echo(summary(_print_answer(engine, request, **options)), err=True)
        if cache is not None:
            engine.save(cache, progress=progress)


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt's text out of the one place that was named."""
    if (prompt is None) == (prompt_file is None):
        raise click.UsageError('give either PROMPT ("-" for stdin) or --prompt-file')
    if prompt_file is not None:
        return read_text(prompt_file)
    if prompt == "-":
        return sys.stdin.read().removesuffix("\n")
    return str(prompt)


def read_text(path: Path) -> str:
    """The text of a file, without one line break at its end."""
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise click.BadParameter(f"{path} is not UTF-8 text: {error}") from error


def as_prompt(text: str, *, chat: bool) -> Prompt:
    """The text as it is, or as a user's message."""
    return [{"role": "user", "content": text}] if chat else text


def _print_answer(engine: InferenceEngine, prompt: Prompt, **options: Any) -> GenerationResult:
    """Print the answer piece by piece as it comes."""
    with warnings_afterwards(), engine.stream(prompt, **options) as pieces:
        for piece in pieces:
            click.echo(piece, nl=False)
        click.echo()
        return pieces.result


def summary(result: GenerationResult) -> str:
    """One line: how much, how fast, how much of it reused, why it ended."""
    return (
        f"{result.generated_tokens} tokens in {result.total_ms / 1e3:.2f} s, "
        f"first after {result.ttft_ms:.0f} ms; "
        f"{result.cached_tokens} of {result.prompt_tokens} prompt tokens from the cache; "
        f"ended by {result.finish_reason}"
    )
