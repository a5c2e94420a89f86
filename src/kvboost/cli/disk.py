"""`kvboost stats` and `kvboost disk`: folders with saved or cached text; no model is loaded.

A saved cache is told from its header, not from what lies beside it. Of a folder behind --disk-cache-dir, the
disk tier says what is good and what is not. Knows how to show it.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from kvboost.cli.bench_view import simple_table
from kvboost.cli.options import json_option
from kvboost.cli.session import FOLDER
from kvboost.errors import CacheFileError

if TYPE_CHECKING:
    from kvboost.disk.tier import DiskTier

EXISTING = click.Path(exists=True, file_okay=False, path_type=Path)
SHOWN_DIGITS = 12  # of a namespace
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
@json_option
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
            facts = ("slots", "good", "corrupt", "writing", "free", "problems")
            one = {"folder": str(tier_folder), **{name: getattr(report, name) for name in facts}}
            found.append({**one, "repaired": repair and bool(report.corrupt)})
    _tell(found, None if as_json else check_table(found))
    if any(one["corrupt"] or one["problems"] for one in found):
        raise click.exceptions.Exit(_DAMAGED)


def check_table(found: list[dict[str, Any]]) -> Table:
    """A row per folder."""
    table = simple_table("folder", "slots", "good", "damaged", "free", "being written")
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
            chunks = [header for header in tier.headers() if header.is_chunk_of(None)]
            tokens = sum(len(header.token_ids) for header in chunks)
            bits = chunks[0].meta["bits"] if chunks else None
            found.append({**tier.stats(), "model": tier.label, "tokens": tokens, "kv_cache_bits": bits})
    return found


def disk_table(found: list[dict[str, Any]]) -> Table:
    """A row per model."""
    table = simple_table("model", "bits", "chunks", "of", "tokens", "used", "set aside")
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


# --- stats -----------------------------------------------------------------------------------------


@click.command()
@click.option("--cache", type=FOLDER, help="Folder of a saved cache.")
@click.option("--disk", "disk_folder", type=FOLDER, help="Folder behind --disk-cache-dir.")
@json_option
def stats(cache: Path | None, disk_folder: Path | None, as_json: bool) -> None:
    """What a saved cache or a disk cache holds: whose, how much, how often used.

    \b
    kvboost stats --cache ./cache
    kvboost stats --disk ./disk-cache
    """
    if (cache is None) == (disk_folder is None):
        raise click.UsageError("give --cache or --disk, and not both")
    if disk_folder is not None:
        found = disk_stats(disk_folder)
        _tell(found, None if as_json else disk_table(found))
        return
    assert cache is not None
    from kvboost.disk.snapshot import read_header

    summary = summarize(cache, read_header(cache))
    _tell(summary, None if as_json else stats_table(summary))


def _tell(document: Any, table: Table | None) -> None:
    """The table where there is one, else the document as JSON."""
    if table is None:
        click.echo(json.dumps(document))
    else:
        Console(highlight=False).print(table)


def summarize(folder: Path, header: dict[str, Any]) -> dict[str, Any]:
    """The header in numbers, and the bytes that the folder takes."""
    chunks = header["chunks"]
    try:
        tokens = sum(int(chunk["length"]) for chunk in chunks)
        uses = [int(chunk["access_count"]) for chunk in chunks]
        namespaces = {str(chunk["namespace"]) for chunk in chunks}
        shards = {str(chunk["shard"]) for chunk in chunks}
        kv_bytes = sum(int(chunk["bytes"]) for chunk in chunks)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CacheFileError(f"the header of {folder} is damaged: {error!r}") from error
    return {
        "cache": str(folder),
        "model": header["model"],
        "namespace": header["family"],
        "saved_at": header.get("saved_at"),
        "chunks": len(chunks),
        "tokens": tokens,
        "kv_cache_bits": header.get("kv_cache_bits"),
        "kv_bytes": kv_bytes,
        "disk_bytes": sum(path.stat().st_size for path in folder.iterdir() if path.is_file()),
        "missing_files": sorted(name for name in shards if not (folder / name).is_file()),
        "namespaces": len(namespaces),
        "chunks_by_uses": uses_histogram(uses),
    }


def _bits_in_words(bits: Any) -> str:
    widths = {16: "computed", "k8v4": "8-bit keys and 4-bit values"}
    return widths.get(bits) or f"{bits}-bit keys and values"


def uses_histogram(uses: list[int]) -> dict[str, int]:
    """Chunks by number of uses: 0, 1, then ranges that double."""
    found = Counter(count.bit_length() for count in uses)
    names = {bits: str(bits) if bits < 2 else f"{1 << bits >> 1}-{(1 << bits) - 1}" for bits in found}
    return {names[bits]: found[bits] for bits in sorted(found)}


def stats_table(summary: dict[str, Any]) -> Table:
    """One row per fact, then a bar per number of uses."""
    table = Table(box=box.SIMPLE, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in (
        ("cache", summary["cache"]),
        ("model", summary["model"]),
        ("namespace", summary["namespace"][:SHOWN_DIGITS]),
        ("saved", summary["saved_at"] or "unknown"),
        ("chunks", f"{summary['chunks']:,}"),
        ("tokens", f"{summary['tokens']:,}"),
        (
            "KV",
            f"{size_in_words(summary['kv_bytes'])} in RAM, {size_in_words(summary['disk_bytes'])} on disk",
        ),
        ("stored as", _bits_in_words(summary["kv_cache_bits"])),
        ("namespaces", f"{summary['namespaces']:,} (one per salt and offset)"),
    ):
        table.add_row(name, escape(value))
    if summary["missing_files"]:
        table.add_row("missing", f"[red]{escape(', '.join(summary['missing_files']))}[/red]")
    table.add_section()
    most = max(summary["chunks_by_uses"].values(), default=1)
    for uses, count in summary["chunks_by_uses"].items():
        bar = "█" * max(round(count / most * 30), 1)
        table.add_row(f"used {uses} x", f"{bar} {count:,}")
    return table


def size_in_words(size_bytes: int) -> str:
    """A number of bytes with its unit."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB")):
        if size_bytes >= factor:
            return f"{size_bytes / factor:,.1f} {unit}"
    return f"{size_bytes / 1e3:,.1f} kB"
