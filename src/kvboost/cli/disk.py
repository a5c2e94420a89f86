"""`kvboost disk`: look after the folder behind --disk-cache-dir; no model is loaded.

Knows how to show it; what is good and what is not, the disk tier says.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from kvboost.cli.bench_view import simple_table
from kvboost.errors import CacheFileError

if TYPE_CHECKING:
    from kvboost.disk.tier import DiskTier

EXISTING = click.Path(exists=True, file_okay=False, path_type=Path)
_DAMAGED = 3  # exit status of a check that found damage


@click.group()
def disk() -> None:
    """Look after the folder behind --disk-cache-dir.

    \b
    kvboost stats --disk DIR      what it holds
    kvboost disk check DIR        read everything and check it over
    kvboost disk clear DIR        forget everything
    """


@disk.command()
@click.argument("folder", type=EXISTING)
@click.option("--repair", is_flag=True, help="Drop what is damaged.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead.")
def check(folder: Path, repair: bool, as_json: bool) -> None:
    """Read every chunk in FOLDER and compare it with its checksum.

    Exit status 0: all is good; 3: something is damaged (and with --repair dropped).
    """
    found = []
    console = Console(stderr=True)
    for tier_folder in tier_folders(folder):
        with open_tier(tier_folder) as tier, Progress(console=console, transient=True) as progress:
            task = progress.add_task(tier_folder.name, total=None)

            def show(done: int, total: int, progress: Progress = progress, task: Any = task) -> None:
                progress.update(task, completed=done, total=total)

            report = tier.check(repair=repair, progress=show)
            found.append(
                {
                    "folder": str(tier_folder),
                    "slots": report.slots,
                    "good": report.good,
                    "corrupt": report.corrupt,
                    "writing": report.writing,
                    "free": report.free,
                    "problems": report.problems,
                    "repaired": repair and bool(report.corrupt),
                }
            )
    if as_json:
        click.echo(json.dumps(found))
    else:
        Console(highlight=False).print(check_table(found))
    if any(one["corrupt"] or one["problems"] for one in found):
        raise click.exceptions.Exit(_DAMAGED)


def check_table(found: list[dict[str, Any]]) -> Table:
    """A row per folder."""
    table = simple_table("folder")
    for heading in ("slots", "good", "damaged", "free", "being written"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in found:
        damaged = f"[red]{len(one['corrupt'])}[/red]" if one["corrupt"] else "0"
        if one["repaired"]:
            damaged += " (dropped)"
        table.add_row(
            escape(Path(one["folder"]).name),
            f"{one['slots']:,}",
            f"{one['good']:,}",
            damaged,
            f"{one['free']:,}",
            f"{one['writing']:,}",
        )
    return table


@disk.command()
@click.argument("folder", type=EXISTING)
@click.option("--yes", is_flag=True, help="Do not ask.")
def clear(folder: Path, yes: bool) -> None:
    """Forget everything that is kept in FOLDER, of all models."""
    folders = tier_folders(folder)
    if not yes:
        click.confirm(f"Forget all cached text in {folder}?", abort=True)
    chunks = 0
    for tier_folder in folders:
        with open_tier(tier_folder) as tier:
            chunks += len(tier)
            tier.clear()
    click.echo(f"{chunks:,} chunks forgotten")


def tier_folders(folder: Path) -> list[Path]:
    """The folders with chunks in `folder`: one per model, encoding and chunk size, or itself.

    `CacheFileError` where others own one of them, or may write to it.
    """
    from kvboost.disk.folder import DESCRIPTION, check_contents
    from kvboost.disk.trust import real_folder

    folder = real_folder(folder)
    check_contents(folder)
    found = sorted(path.parent for path in [*folder.glob(DESCRIPTION), *folder.glob(f"*/{DESCRIPTION}")])
    if not found:
        raise CacheFileError(f"{folder} holds no disk cache: there is no {DESCRIPTION} in it or below it")
    for path in found:
        check_contents(path)
    return found


def open_tier(folder: Path) -> DiskTier:
    """The tier in `folder`, with the sizes that it was made with."""
    from kvboost.disk.tier import DiskTier

    return DiskTier.existing(folder)


def disk_stats(folder: Path) -> list[dict[str, Any]]:
    """What every tier in `folder` holds."""
    found = []
    for tier_folder in tier_folders(folder):
        with open_tier(tier_folder) as tier:
            entries = tier.entries()
            found.append(
                {
                    **tier.stats(),
                    "model": tier.label,
                    "tokens": sum(len(entry.header.token_ids) for entry in entries),
                    "kv_cache_bits": entries[0].header.meta["bits"] if entries else None,
                }
            )
    return found


def disk_table(found: list[dict[str, Any]]) -> Table:
    """A row per model."""
    table = simple_table("model")
    for heading in ("bits", "chunks", "of", "tokens", "used", "set aside"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in found:
        table.add_row(
            escape(one["model"] or Path(one["folder"]).name),
            str(one["kv_cache_bits"] or "-"),
            f"{one['chunks']:,}",
            f"{one['max_chunks']:,}",
            f"{one['tokens']:,}",
            f"{one['bytes'] / 1e6:,.1f} MB",
            f"{one['allocated_bytes'] / 1e6:,.1f} MB",
        )
    return table
