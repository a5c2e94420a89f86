"""`kvboost stats`: what a saved cache holds, told from its header; no model is loaded.

Knows the header's fields, not the format of what lies beside it.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvboost.cli.cache_folder import FOLDER
from kvboost.cli.disk import disk_stats, disk_table
from kvboost.errors import CacheFileError

SHOWN_DIGITS = 12  # of a namespace


@click.command()
@click.option("--cache", type=FOLDER, help="Folder of a saved cache.")
@click.option("--disk", "disk_folder", type=FOLDER, help="Folder behind --disk-cache-dir.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead.")
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
        if as_json:
            click.echo(json.dumps(found))
        else:
            Console(highlight=False).print(disk_table(found))
        return
    assert cache is not None
    from kvboost.disk.snapshot import read_header

    summary = summarize(cache, read_header(cache))
    if as_json:
        click.echo(json.dumps(summary))
    else:
        Console(highlight=False).print(stats_table(summary))


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
        "disk_bytes": _disk_bytes(folder),
        "missing_files": sorted(name for name in shards if not (folder / name).is_file()),
        "namespaces": len(namespaces),
        "chunks_by_uses": uses_histogram(uses),
    }


def _bits_in_words(bits: Any) -> str:
    widths = {16: "computed", "k8v4": "8-bit keys and 4-bit values"}
    return widths.get(bits) or f"{bits}-bit keys and values"


def _disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def uses_histogram(uses: list[int]) -> dict[str, int]:
    """Chunks by number of uses: 0, 1, then ranges that double."""
    found = Counter(count.bit_length() for count in uses)
    return {_range_name(bits): found[bits] for bits in sorted(found)}


def _range_name(bits: int) -> str:
    low, high = (1 << bits) >> 1, (1 << bits) - 1
    return str(low) if bits < 2 else f"{low}-{high}"


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
        ("KV", f"{_size(summary['kv_bytes'])} in RAM, {_size(summary['disk_bytes'])} on disk"),
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


def _size(size_bytes: int) -> str:
    for factor, unit in ((1e9, "GB"), (1e6, "MB")):
        if size_bytes >= factor:
            return f"{size_bytes / factor:,.1f} {unit}"
    return f"{size_bytes / 1e3:,.1f} kB"
