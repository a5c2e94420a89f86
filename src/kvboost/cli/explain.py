"""`kvboost explain`: what would be reused of a prompt, and why the rest would not.

Knows where prompt and cache come from; the explanation is the engine's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from kvboost.cli.cache_folder import FOLDER, load_cache, unlimited
from kvboost.cli.generate import as_prompt, read_prompt, read_text
from kvboost.cli.options import GroupedCommand, engine_options_with
from kvboost.cli.session import opened_engine
from kvboost.cli.warm import TEXT_FILE, raise_errors, warm_texts

if TYPE_CHECKING:
    from kvboost.reuse.explain import Explanation


@click.command(cls=GroupedCommand)
@click.argument("model")
@click.argument("prompt", required=False)
@click.option("--prompt-file", type=TEXT_FILE, help="Read the prompt from a UTF-8 text file.")
@click.option("--chat", is_flag=True, help="Treat prompt and warmed texts as a user's messages.")
@click.option("--cache", type=FOLDER, help="Folder of a saved cache to look into.")
@click.option(
    "--warm", "warm_files", type=TEXT_FILE, multiple=True, help="A text file to read first; repeatable."
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Length of the answer that the prompt would get: some models reuse nothing beyond a length.",
)
@click.option("--full", is_flag=True, help="Leave nothing out of long prompts.")
@click.option("--svg", "svg_file", type=click.Path(dir_okay=False, path_type=Path), help="Also draw it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead.")
@engine_options_with(max_chunks="128; with --cache no limit")
def explain(
    model: str,
    prompt: str | None,
    prompt_file: Path | None,
    chat: bool,
    cache: Path | None,
    warm_files: tuple[Path, ...],
    max_new_tokens: int,
    full: bool,
    svg_file: Path | None,
    as_json: bool,
    engine_options: dict[str, Any],
) -> None:
    """Show what MODEL would reuse of PROMPT, span by span, and why not the rest.

    Exact: reused as it is. Approximate: reused from another place. Recomputed: reused and repaired. Live:
    computed. Nothing is generated, and neither the prompt nor the warmed texts are saved. PROMPT may be
    "-" for stdin; one line break at the end of stdin or of a file is not part of it.

    \b
    kvboost explain builtin --prompt-file question.txt --cache ./cache
    kvboost explain builtin "Be brief. Why?" --warm system.txt
    """
    text = read_prompt(prompt, prompt_file)
    texts = {path: read_text(path) for path in warm_files}
    options = engine_options if cache is None else unlimited(engine_options)
    with opened_engine(model, options, None if as_json else Console(stderr=True)) as engine:
        if cache is not None:
            load_cache(engine, cache, progress=False if as_json else None)
        raise_errors(warm_texts(engine, texts, chat=chat, show=False))
        explanation = engine.explain(as_prompt(text, chat=chat), max_new_tokens)
    _show(explanation, full=full, as_json=as_json, svg_file=svg_file)


def _show(explanation: Explanation, *, full: bool, as_json: bool, svg_file: Path | None) -> None:
    from kvboost.cli import explain_view

    if svg_file is not None:
        svg_file.write_text(explain_view.svg(explanation, full=full), encoding="utf-8")
    if as_json:
        click.echo(json.dumps(explanation.to_dict()))
    else:
        explain_view.show(explanation, Console(), full=full)
