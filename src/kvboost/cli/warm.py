"""`kvboost warm`: read texts once and keep what the model made of them, in a folder.

Knows files and folders; reading and keeping are the engine's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import track

from kvboost.cli.generate import as_prompt, read_text
from kvboost.cli.options import GroupedCommand, engine_options_with, json_option
from kvboost.cli.session import FOLDER, holds_cache, load_cache, opened_engine, unlimited, warn
from kvboost.errors import KVBoostError

if TYPE_CHECKING:
    from kvboost.engine import InferenceEngine
    from kvboost.models import WarmResult
    from kvboost.requests.prompts import Prompt

TEXT_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(cls=GroupedCommand)
@click.argument("model")
@click.argument("files", nargs=-1, required=True, type=TEXT_FILE, metavar="FILE...")
@click.option(
    "--cache", type=FOLDER, required=True, help="Folder of the saved cache; what it holds already stays."
)
@click.option(
    "--chat",
    is_flag=True,
    help="Treat each text as a user's message, the one of --behind as a system message.",
)
@click.option(
    "--documents", is_flag=True, help="The texts are documents, to be found anywhere in later prompts."
)
@click.option(
    "--behind", type=TEXT_FILE, help="With --documents: a file with the text that they will follow."
)
@json_option
@engine_options_with(max_chunks="no limit")
def warm(
    model: str,
    files: tuple[Path, ...],
    cache: Path,
    chat: bool,
    documents: bool,
    behind: Path | None,
    as_json: bool,
    engine_options: dict[str, Any],
) -> None:
    """Read text FILEs with MODEL once and save what came of it, for prompts that begin alike.

    With --documents, for prompts that have them anywhere: each is read behind the ones before it, and all
    behind the text of --behind, since what was read first of all transfers worse.

    One line break at the end of a file is not part of its text. The number of chunks has no limit here
    unless you set one. A file that cannot be used is left out; the others are saved.

    \b
    kvboost warm builtin handbook.txt rules.txt --cache ./cache
    kvboost warm builtin pages/*.txt --documents --behind system.txt --cache ./cache
    kvboost generate builtin --prompt-file question.txt --cache ./cache
    """
    if behind is not None and not documents:
        raise click.UsageError("--behind says what documents will follow: give --documents too")
    if chat and documents and behind is None:
        raise click.UsageError("with --documents, --chat is about the text of --behind: give --behind too")
    texts = {path: read_text(path) for path in files}
    before = read_text(behind) if behind is not None else None
    known = holds_cache(cache)
    quiet = as_json or not sys.stderr.isatty()
    with opened_engine(model, unlimited(engine_options), None if as_json else Console(stderr=True)) as engine:
        loaded = load_cache(engine, cache, progress=not quiet) if known else 0
        if documents:
            follows = [{"role": "system", "content": before}] if chat and before is not None else before
            warmed = warm_documents(engine, texts, follows, show=not quiet)
        else:
            warmed = warm_texts(engine, texts, chat=chat, show=not quiet)
        saved = engine.save(cache, progress=not quiet)
        counts = engine.cache_stats()
    if lost := counts["evicted_chunks"] + sum(counts["refused"].values()):
        warn(f"{lost} chunks could not be kept: see --max-chunks and --max-cache-bytes")
    if as_json:
        document = {"model": model, "cache": str(cache), "files": warmed, "loaded_chunks": loaded}
        click.echo(json.dumps({**document, "saved_chunks": saved, "lost_chunks": lost}))
    else:
        for item in warmed:
            if "error" not in item:
                click.echo(f"{item['file']}: tokens: {item['tokens']:,}, chunks: {item['chunks']:,}")
        click.echo(f"{cache}: chunks: {saved:,}, from before: {loaded:,}")
    raise_errors(warmed)


def raise_errors(warmed: list[dict[str, Any]]) -> None:
    """Raise where a file could not be used, naming it."""
    errors = [f"{item['file']} was left out: {item['error']}" for item in warmed if "error" in item]
    if errors:
        raise KVBoostError("; ".join(errors))


def warm_texts(
    engine: InferenceEngine, texts: dict[Path, str], *, chat: bool, show: bool
) -> list[dict[str, Any]]:
    """Warm each text; per file its tokens and chunks, or the error."""
    bar = track(texts.items(), "reading", total=len(texts), console=Console(stderr=True), disable=not show)
    return [{"file": str(path), **_warm_one(engine, as_prompt(text, chat=chat))} for path, text in bar]


def warm_documents(
    engine: InferenceEngine, texts: dict[Path, str], behind: Prompt | None, *, show: bool
) -> list[dict[str, Any]]:
    """Warm the texts that can be read as documents; per file its tokens and chunks, or the error."""
    errors = {path: _why_unreadable(engine, text, behind) for path, text in texts.items()}
    good = [path for path in texts if not errors[path]]
    results = engine.warm_documents([texts[path] for path in good], behind, progress=show)
    counts = {path: _counted(result) for path, result in zip(good, results, strict=True)}
    return [{"file": str(path), **counts.get(path, {"error": errors[path]})} for path in texts]


def _why_unreadable(engine: InferenceEngine, text: str, behind: Prompt | None) -> str:
    try:
        engine.core.documents.plan([text], behind, None)
    except KVBoostError as error:
        return str(error).removeprefix("document 0: ").replace("document 0 has", "it has")
    return ""


def _warm_one(engine: InferenceEngine, prompt: Prompt) -> dict[str, Any]:
    try:
        result = engine.warm(prompt)
    except KVBoostError as error:
        return {"error": str(error)}
    return _counted(result)


def _counted(result: WarmResult) -> dict[str, Any]:
    return {"tokens": result.token_count, "chunks": result.chunks_stored}
