"""`kvboost bench peers`: the first token beside Hugging Face, llama.cpp, vLLM and others.

Knows how the record is shown, not how it is measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.table import Table

from kvboost.cli.bench_view import bar, opened, prepare, read_counts, show, simple_table, title
from kvboost.cli.options import GroupedCommand, engine_options

_COUNT = click.IntRange(min=1)
COMPARED = ("max_chunks",)


@click.command(cls=GroupedCommand)
@click.option(
    "--lengths",
    default="1024,2048,4096",
    show_default=True,
    callback=read_counts,
    help="Shared tokens, one measurement each.",
)
@click.option("--rounds", type=_COUNT, default=10, show_default=True, help="Per length.")
@click.option(
    "--plain-rounds",
    type=_COUNT,
    default=3,
    show_default=True,
    help="Rounds in which plain generate, the slow one, takes part.",
)
@click.option(
    "--new-tokens", type=click.IntRange(min=2), default=16, show_default=True, help="Length of the answers."
)
@click.option(
    "--quality-prompts",
    type=click.IntRange(min=0),
    default=2,
    show_default=True,
    help="Per length, for the distance of the first token's distribution.",
)
@click.option(
    "--reordered",
    type=click.IntRange(min=0),
    default=6,
    show_default=True,
    help="Prompts of known documents in another order.",
)
@click.option("--documents", type=_COUNT, default=8, show_default=True, help="In each of those.")
@click.option("--document-tokens", type=_COUNT, default=512, show_default=True, help="Length of each.")
@click.option(
    "--peers-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=".venv-peers",
    show_default=True,
    help="Where `make peers` put the environments.",
)
@click.option(
    "--deadline",
    type=click.FloatRange(min=1),
    default=600.0,
    show_default=True,
    help="Seconds that a peer has for one request.",
)
@click.option("--model", default="builtin", show_default=True, help='A hub name, a folder, or "builtin".')
@click.option("--seed", type=int, default=0, show_default=True, help="Of the order of documents.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Also write the JSON and a plot (SVG and PNG) into this folder.",
)
@click.option("--plot/--no-plot", default=True, show_default=True, help="With --out.")
@click.option("--json", "as_json", is_flag=True, help="Print only the line of JSON.")
@engine_options
def peers(
    lengths: tuple[int, ...],
    rounds: int,
    plain_rounds: int,
    new_tokens: int,
    quality_prompts: int,
    reordered: int,
    documents: int,
    document_tokens: int,
    peers_dir: Path,
    deadline: float,
    model: str,
    seed: int,
    out: Path | None,
    plot: bool,
    as_json: bool,
    engine_options: dict[str, Any],
) -> None:
    """Other engines on the same prompts: Hugging Face, llama.cpp, the kvboost of PyPI, vLLM.

    `make peers` sets the others up, each in an environment of its own; one that cannot be installed or fails
    is listed with the reason. All processes are started first and take turns within every round. The
    beginning of a prompt was seen before; 20 tokens behind it are new in every round. Times are wall
    time from the call to the first token.

    \b
    make peers && kvboost bench peers --out results
    kvboost bench peers --lengths 1024 --rounds 3 --plain-rounds 1 --reordered 0
    """
    from benchmarks.suite import plots
    from benchmarks.suite.peer_prompts import PeerSettings
    from benchmarks.suite.peers import run

    settings = PeerSettings(
        lengths=lengths,
        rounds=rounds,
        plain_rounds=min(plain_rounds, rounds),
        new_tokens=new_tokens,
        quality_prompts=quality_prompts,
        reordered=reordered,
        documents=documents,
        document_tokens=document_tokens,
        deadline_s=deadline,
        seed=seed,
    )
    plot = plot and reordered > 0
    prepare(out, plot=plot)
    with opened(model, engine_options, COMPARED) as (engine, _), bar() as report:
        record = run(engine, model, settings, peers_dir.resolve(), report)
    parts = [
        title(record),
        peers_table(record),
        *profile_parts(record),
        *reordered_parts(record),
        notes(record),
    ]
    show(record, [] if as_json else parts, out, plots.plot_reordered if plot else None)


def peers_table(record: dict[str, Any]) -> Table:
    """A row per length and contestant; where kvboost takes longer than another, it says so in red."""
    table = simple_table("shared")
    table.columns[0].no_wrap = True
    table.add_column("", no_wrap=True)
    for heading in (
        "first token, ms\nmedian (range)",
        "ours\nat",
        "tok/s",
        "same",
        "KL",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for item in record["lengths"]:
        contestants = item["contestants"]
        ours = contestants["kvboost"]["ttft_ms"]["median"]
        for name, found in contestants.items():
            table.add_row(
                f"{item['shared_tokens']:,}" if name == "plain" else "",
                record["peers"][name]["label"],
                *_cells(found, ours, is_ours=name == "kvboost"),
                end_section=name == list(contestants)[-1],
            )
    return table


def profile_parts(record: dict[str, Any]) -> list[Table | str]:
    """Where the time to our first token goes."""
    profiles = {item["shared_tokens"]: item["kvboost_profile"] for item in record["lengths"]}
    if not all(profiles.values()):
        return []
    table = simple_table("kvboost's first token,\nms under a profiler")
    kinds = list(next(iter(profiles.values())))
    for kind in kinds:
        table.add_column(kind.removesuffix("_ms").replace("_", " "), justify="right")
    for shared, profile in profiles.items():
        table.add_row(f"{shared:,} shared", *(f"{profile[kind]:,.0f}" for kind in kinds))
    return [table]


def reordered_parts(record: dict[str, Any]) -> list[Table | str]:
    """Documents in another order: the contestants that reuse them anyway, and plain."""
    reordered = record["reordered"]
    if reordered is None:
        return []
    table = simple_table(
        f"{reordered['documents']} documents of {reordered['document_tokens']} tokens\nin another order"
    )
    for heading in (
        "first token, ms\nmedian (range)",
        "ours\nat",
        "tok/s",
        "same",
        "KL",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    contestants = reordered["contestants"]
    default = next(name for name in contestants if name.startswith("guided"))
    ours = contestants[default]["ttft_ms"]["median"]
    for name, found in contestants.items():
        table.add_row(record["peers"][name]["label"], *_cells(found, ours, is_ours=name == default))
    return [table]


def _cells(found: dict[str, Any], ours_ms: float, *, is_ours: bool) -> tuple[str, ...]:
    ttft, decode, kl = found["ttft_ms"], found["decode_tokens_per_s"], found["first_token_kl"]
    ratio = ours_ms / ttft["median"]
    against = f"{ratio:.2f} x" if ratio <= 1 else f"[red]{ratio:.2f} x[/red]"
    return (
        f"{ttft['median']:,.0f} ({ttft['low']:,.0f}-{ttft['high']:,.0f})",
        "" if is_ours else against,
        f"{decode['median']:.1f}" if decode else "-",
        f"{found['same_tokens_as_plain']}/{found['compared_with_plain']}",
        "-" if kl is None else f"{kl:.1g}",
    )


def notes(record: dict[str, Any]) -> str:
    """What every peer is, and why others are missing."""
    lines = []
    for about in record["peers"].values():
        if "versions" in about:
            versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
            lines.append(f"{about['label']}: {versions}; {about.get('note', '')}".rstrip("; "))
    lines += [f"{missing['label']} is missing: {missing['reason']}" for missing in record["unavailable"]]
    return "\n".join(lines)
