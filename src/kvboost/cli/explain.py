"""`kvboost explain`: what would be reused of a prompt, and why the rest would not.

Shown as a coloured text, a table and a sentence; or the same as an SVG picture. Knows where prompt and cache
come from; the explanation is the engine's.
"""

from __future__ import annotations

import io
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvboost.cli.generate import as_prompt, read_prompt, read_text
from kvboost.cli.options import GroupedCommand, engine_options_with, json_option, setting
from kvboost.cli.session import FOLDER, load_cache, opened_engine, unlimited
from kvboost.cli.warm import TEXT_FILE, raise_errors, warm_texts

if TYPE_CHECKING:
    from kvboost.reuse.explain import ExplainedSpan, Explanation

COLOURS = {"exact": "green", "approximate": "yellow", "recomputed": "magenta", "live": "red"}
SHOWN_CHARACTERS = 600  # of a stretch of one origin
SHOWN_SPANS = 24
SVG_COLUMNS = 92
# What a terminal could take for a command, by its own picture; line breaks and tabs stay.
_CONTROL = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}


@click.command(cls=GroupedCommand)
@click.argument("model")
@click.argument("prompt", required=False)
@click.option("--prompt-file", type=TEXT_FILE, help="Read the prompt from a UTF-8 text file.")
@click.option("--chat", is_flag=True, help="Treat prompt and warmed texts as a user's messages.")
@click.option("--cache", type=FOLDER, help="Folder of a saved cache to look into.")
@click.option(
    "--warm", "warm_files", type=TEXT_FILE, multiple=True, help="A text file to read first; repeatable."
)
@setting(
    "--max-new-tokens",
    64,
    "Length of the answer that the prompt would get: some models reuse nothing beyond a length.",
)
@click.option("--full", is_flag=True, help="Leave nothing out of long prompts.")
@click.option("--svg", "svg_file", type=click.Path(dir_okay=False, path_type=Path), help="Also draw it.")
@json_option
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
    if svg_file is not None:
        svg_file.write_text(svg(explanation, full=full), encoding="utf-8")
    if as_json:
        click.echo(json.dumps(explanation.to_dict()))
    else:
        show(explanation, Console(), full=full)


def show(explanation: Explanation, console: Console, *, full: bool = False) -> None:
    """Print all of it; what is long is cut in the middle unless it is to be shown in `full`."""
    console.print(legend(explanation))
    text = prompt_text(explanation, marked=console.color_system is None, full=full)
    console.print(Padding(text, (1, 2, 0, 2)))
    console.print(spans_table(explanation, full=full))
    console.print(summary(explanation), markup=False, highlight=False)


def svg(explanation: Explanation, *, full: bool = False) -> str:
    """What `show` prints, as a picture that needs nothing from elsewhere."""
    console = Console(
        record=True,
        width=SVG_COLUMNS,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        no_color=False,
    )
    show(explanation, console, full=full)
    picture = console.export_svg(title="kvboost explain", unique_id="kvboost-explain")
    return re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)


def legend(explanation: Explanation) -> Text:
    """The four origins in their colours, with the number of tokens of each."""
    line = Text()
    for origin, colour in COLOURS.items():
        tokens = sum(span.length for span in explanation if span.origin.value == origin)
        line.append("■ ", style=colour)
        line.append(f"{origin} {tokens:,}   ", style="" if tokens else "dim")
    line.rstrip()
    return line


def prompt_text(explanation: Explanation, *, marked: bool, full: bool) -> Text:
    """The prompt, each stretch in the colour of its origin; `marked` with its name in front."""
    text = Text()
    for origin, spans in itertools.groupby(explanation, key=lambda span: span.origin.value):
        if marked:
            text.append(f"[{origin}]")
        stretch = "".join(span.text for span in spans)
        for piece, style in _abbreviated(stretch, COLOURS[origin], full=full):
            text.append(piece.translate(_CONTROL), style=style)
    return text


def _abbreviated(text: str, style: str, *, full: bool) -> Iterator[tuple[str, str]]:
    """`text` in `style`; a long one as its two ends with a note between them."""
    if full or len(text) <= SHOWN_CHARACTERS:
        yield text, style
        return
    end = SHOWN_CHARACTERS // 2
    yield text[:end], style
    yield f" [... {len(text) - 2 * end:,} characters left out ...] ", "dim"
    yield text[-end:], style


def spans_table(explanation: Explanation, *, full: bool) -> Table:
    """A row per span: where it is, where its KV comes from, why not."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("tokens", "origin", "from chunk"):
        table.add_column(heading, no_wrap=True)
    table.add_column("reason", overflow="fold")
    spans = list(explanation)
    cut = len(spans) if full or len(spans) <= SHOWN_SPANS else SHOWN_SPANS // 2
    for span in spans[:cut]:
        table.add_row(*_row(span))
    if cut < len(spans):
        table.add_row("...", Text(f"{len(spans) - 2 * cut:,} spans left out", style="dim"))
        for span in spans[-cut:]:
            table.add_row(*_row(span))
    return table


def _row(span: ExplainedSpan) -> tuple[str, Text, str, Text]:
    origin = span.origin.value
    donor = ""
    if span.donor:
        donor = span.donor[:8]
        if span.donor_positions is not None:
            start, end = span.donor_positions
            donor += f" at {start}-{end}, used {span.donor_uses} x"
            donor += ", on disk" if span.donor_on_disk else ""
    reason = span.reason.translate({**_CONTROL, 9: 0x2409, 10: 0x240A})
    return f"{span.start}-{span.end}", Text(origin, style=COLOURS[origin]), donor, Text(reason)


def summary(explanation: Explanation) -> str:
    """One line, and another where approximate reuse was thought about."""
    total, cached = explanation.prompt_tokens, explanation.cached_tokens
    line = (
        f"{cached:,} of {total:,} tokens would be reused ({explanation.reuse_ratio:.0%}), "
        f"{total - cached:,} computed"
    )
    return f"{line}\n{explanation.choice}" if explanation.choice else line
