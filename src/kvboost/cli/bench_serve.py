"""`kvboost bench serve`: a server under load, beside itself without batching and beside transformers serve.

Knows how the record is shown, not how it is measured.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click
from rich.table import Column, Table

from kvboost.cli.bench_view import bar, json_line, out_option, prepare, show, simple_table, title
from kvboost.cli.options import model_option, setting
from kvboost.cli.session import FOLDER

_RATE = click.FloatRange(min=0, min_open=True)


_DTYPES = ("float32", "bfloat16", "float16")


def _range(_context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, int]:
    """ "600-1000" as two numbers."""
    low, _, high = value.partition("-")
    try:
        found = int(low), int(high or low)
    except ValueError:
        found = (0, 0)
    if not 1 <= found[0] <= found[1]:
        raise click.BadParameter(f"expected something like 600-1000, got {value!r}", param=parameter)
    return found


def check_device(name: str) -> None:
    """Refuse a device that is not there."""
    import torch

    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise click.UsageError(f"--device {name} cannot be used: {str(error).splitlines()[0]}") from error


@click.command()
@setting("--requests", 48, "Per server and round.")
@setting(
    "--rate",
    8.0,
    "Arrivals per second, more than a server can answer: then the time to the last answer counts.",
    _RATE,
)
@setting("--prefixes", 4, "Beginnings that are shared.")
@setting("--prefix-tokens", "600-1000", "Length of each.", str, callback=_range)
@setting("--tail-tokens", "20-60", "New behind it, per request.", str, callback=_range)
@setting(
    "--documents",
    0,
    "RAG traffic: so many documents that the server has read, in another order in every prompt, with "
    "approximate reuse. Only kvboost's two servers take part.",
    click.IntRange(min=0),
)
@setting("--document-tokens", "300-500", "Length of each.", str, callback=_range)
@setting("--new-tokens", 48, "Longest answer.")
@setting("--rounds", 1, "Fresh servers and text in each.")
@setting(
    "--long-tokens",
    4_000,
    "A prompt of this length arrives amid a steady load; 0 leaves that part out.",
    click.IntRange(min=0),
)
@setting("--steady-requests", 32, "Of that load, with and without it.")
@setting("--steady-rate", 1.0, "Arrivals per second.", _RATE)
@click.option(
    "--only",
    "contestants",
    multiple=True,
    type=click.Choice(["kvboost", "no_batching", "transformers_cb", "transformers"]),
    help="Servers that take part; several times for several.  [default: all]",
)
@click.option(
    "--serve-flags",
    default="",
    metavar="FLAGS",
    help='More flags for both of kvboost\'s servers, e.g. "--max-sequences 8".',
)
@setting("--peers-dir", ".venv-peers", "Where `make peers` put the environments.", FOLDER)
@setting("--deadline", 900.0, "Seconds that a server has to answer everything.", click.FloatRange(min=1))
@model_option
@setting("--device", "cpu", 'Where all servers run: "cpu", "cuda", ...', str)
@setting("--dtype", "float32", "Number format of the weights.", click.Choice(_DTYPES))
@setting("--seed", 0, "Of lengths and arrivals.", int)
@out_option
@json_line
def serve(
    contestants: tuple[str, ...],
    serve_flags: str,
    peers_dir: Path,
    deadline: float,
    model: str,
    out: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """A server under load: requests that arrive at random and share beginnings, over HTTP, streamed.

    Four servers, each started as a process of its own and asked the same: kvboost serve, the same with
    --no-batching, and transformers serve with and without continuous batching (`make peers` sets it up).
    Arrivals do not wait for answers. Throughput is the tokens of all answers by the time from the first
    arrival to the last token; the time to the first token is counted from when a request was due.

    Then a steady load runs twice on kvboost serve, the second time with a long prompt in the middle: how
    much longer do the others wait for their next token while it is read?

    Takes about eight minutes with the default settings on two cores.

    \b
    make peers && kvboost bench serve --out results
    kvboost bench serve --only kvboost --only no_batching --requests 16
    kvboost bench serve --documents 6 --requests 24
    kvboost bench serve --model random:8b --device cuda --dtype bfloat16 --requests 256 --rate 64
    """
    from kvboost.bench.serve import run
    from kvboost.bench.serve_load import ServeSettings
    from kvboost.bench.serve_servers import ALONE, KVBOOST, LABELS

    possible = (KVBOOST, ALONE) if options["documents"] else tuple(LABELS)
    if unfit := [name for name in contestants if name not in possible]:
        raise click.UsageError(f"--documents is for {KVBOOST} and {ALONE}; leave out --only {unfit[0]}")
    check_device(options["device"])
    settings = ServeSettings(
        contestants=tuple(name for name in possible if not contestants or name in contestants),
        serve_flags=tuple(shlex.split(serve_flags)),
        deadline_s=deadline,
        **options,
    )
    prepare(out)
    with bar() as report:
        record = run(model, settings, peers_dir.resolve(), report)
    parts = [title(record), servers_table(record), *rag_parts(record), *long_parts(record), notes(record)]
    show(record, [] if as_json else parts, out)


def servers_table(record: dict[str, Any]) -> Table:
    """A row per server."""
    headings = ("tokens/s", "kvboost\nis at", "first token, s\np50 / p99", "gap, ms\np50 / p99", "answered")
    table = simple_table(Column("", overflow="fold", min_width=18), *headings)
    ours = record["servers"].get("kvboost", {}).get("tokens_per_s")
    for name, found in record["servers"].items():
        against = f"{ours / found['tokens_per_s']:.2f} x" if ours and found["tokens_per_s"] else "-"
        table.add_row(
            found["label"],
            f"{found['tokens_per_s']:.1f}",
            "" if name == "kvboost" else against,
            _times(found["ttft_ms"], ("p50", "p99"), 1e3, ".1f"),
            _times(found["gap_ms"], ("p50", "p99"), 1, ",.0f"),
            f"{found['answered']}/{found['requests']}",
        )
    return table


def _times(found: dict[str, float] | None, names: tuple[str, ...], unit: float, form: str) -> str:
    return "-" if found is None else " / ".join(format(found[name] / unit, form) for name in names)


def rag_parts(record: dict[str, Any]) -> list[str]:
    """How many answers are those that came one by one, and where the others part."""
    ours = record["servers"].get("kvboost")
    if "differences" not in record or ours is None or not ours["compared"]:
        return []
    lines = [
        f"{ours['same_text_as_no_batching']} of {ours['compared']} answers are those that came one by one."
    ]
    for each in record["differences"]:
        close = "" if each["margin_nats"] is None else f", which was {each['margin_nats']:.3f} nats likelier"
        lines.append(
            f"  request {each['request']} parts at token {each['at']}: {each['token']!r} instead of "
            f"{each['one_by_one']!r}{close}"
        )
    return ["\n".join(lines)]


def long_parts(record: dict[str, Any]) -> list[Table | str]:
    """Gaps between tokens with and without the long prompt."""
    long = record["long_prompt"]
    if long is None:
        return []
    table = simple_table("gaps between tokens, ms", "p50", "p95", "p99", "highest")
    tokens = f"{long['long_prompt_tokens']:,}"
    for name, part, label in (
        ("without", "all_ms", "a steady load"),
        ("without", "then_ms", "  at the time of the long prompt"),
        ("with", "all_ms", f"the same and {tokens} tokens"),
        ("with", "then_ms", "  while they are read"),
    ):
        cells = [_times(long[name][part], (each,), 1, ",.0f") for each in ("p50", "p95", "p99", "high")]
        table.add_row(label, *cells)
    return [table, f"The long prompt's first token came after {long['long_ttft_ms'] / 1e3:.1f} s."]


def notes(record: dict[str, Any]) -> str:
    """What went wrong, and who is missing."""
    lines = []
    for found in record["servers"].values():
        lines += [f"{found['label'].strip()}: {error}" for error in found["errors"]]
    lines += [f"{missing['label']} is missing: {missing['reason']}" for missing in record["unavailable"]]
    return "\n".join(lines)
