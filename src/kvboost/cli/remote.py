"""`kvboost remote`: what a store that several machines share holds; no model is loaded.

Knows how to show it, and when to ask before something is deleted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from kvboost.cli.bench_view import simple_table
from kvboost.cli.disk import size_in_words
from kvboost.cli.options import json_option

if TYPE_CHECKING:
    from kvboost.remote.byte_store import ByteStore
    from kvboost.remote.inventory import Progress as Show

_DAMAGED = 3  # exit status of a check that found damage
_SHOWN_DIGITS = 12  # of a tenant
address_argument = click.argument("address")
salt_option = click.option("--cache-salt", metavar="TEXT", help="Only what was stored under this salt.")


@click.group()
def remote() -> None:
    """Look after the store behind --remote-cache: Redis, or a bucket of S3.

    \b
    kvboost remote stats redis://host:6379     what it holds, of whom
    kvboost remote check s3://bucket/prefix    read everything and check it over
    kvboost remote clear redis://host:6379     delete what kvboost stored there
    """


@remote.command()
@address_argument
@salt_option
@json_option
def stats(address: str, cache_salt: str | None, as_json: bool) -> None:
    """What the store at ADDRESS holds of each tenant, and what it says about itself.

    With --cache-salt, also the prefix of all names of that tenant, for rules of access.
    """
    from kvboost.remote import inventory
    from kvboost.remote.byte_store import DENIED, StoreError

    with _opened(address) as store, _progress("names") as show:
        prefix = _prefix(cache_salt)
        held = inventory.holdings(inventory.listed(store, prefix, show))
        try:
            about = store.about()
        except StoreError as error:
            if error.reason != DENIED:  # a tenant may use the store and yet not be told about it
                raise
            about = {}
        shown = store.name
    found: dict[str, Any] = {"address": shown, "about": about, "warnings": warnings_of(about)}
    if cache_salt is not None:
        found["prefix"] = prefix
    found["tenants"] = [each.as_dict() for each in held]
    if as_json:
        click.echo(json.dumps(found))
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(about_table(found))
    console.print(tenants_table(found["tenants"]))
    for warning in found["warnings"]:
        click.secho(f"warning: {warning}", fg="yellow", err=True)


def warnings_of(about: dict[str, Any]) -> list[str]:
    """Settings of Redis under which a shared store does not do what it should."""
    found = []
    if about.get("policy") == "noeviction":
        found.append(
            "maxmemory-policy is noeviction: a full Redis keeps nothing new. "
            "CONFIG SET maxmemory-policy allkeys-lru lets it drop what was used longest ago."
        )
    if about.get("max_bytes") == 0:
        found.append(
            "maxmemory is 0: Redis takes memory until there is none. CONFIG SET maxmemory 8gb sets a limit."
        )
    return found


def about_table(found: dict[str, Any]) -> Table:
    """A row per fact about the store."""
    table = Table(box=box.SIMPLE, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    about = found["about"]
    table.add_row("store", escape(found["address"]))
    if about.get("used_bytes") is not None:
        limit = f" of {size_in_words(about['max_bytes'])}" if about.get("max_bytes") else ", no limit"
        table.add_row("memory", size_in_words(about["used_bytes"]) + limit)
    names = {"policy": "evicts", "evicted": "evicted", "nodes": "nodes"}
    for name, label in names.items():
        if about.get(name) is not None:
            value = about[name]
            table.add_row(label, f"{value:,}" if isinstance(value, int) else escape(str(value)))
    if not about:
        table.add_row("settings", "not shown to this user")
    if "prefix" in found:
        table.add_row("prefix", found["prefix"])
    return table


def tenants_table(tenants: list[dict[str, Any]]) -> Table:
    """A row per tenant."""
    table = simple_table("tenant", "records", "parts", "places", "size")
    for one in tenants:
        counts = [f"{one[name]:,}" for name in ("records", "parts", "places")]
        table.add_row(one["tenant"][:_SHOWN_DIGITS], *counts, size_in_words(one["bytes"]))
    return table


@remote.command()
@address_argument
@salt_option
@click.option("--delete", is_flag=True, help="Delete what is damaged or of no use any more.")
@json_option
def check(address: str, cache_salt: str | None, delete: bool, as_json: bool) -> None:
    """Read every record in the store at ADDRESS and compare it with its checksums.

    Records of which the store has evicted a part (incomplete) and places (windows, tails) that point to
    records which are gone (lost) are counted, too: they are misses, no damage. Exit status 0: nothing is
    damaged; 3: something is (and with --delete it is deleted).
    """
    from kvboost.remote import inventory

    with _opened(address) as store:
        with _progress("names") as show:
            names = inventory.listed(store, _prefix(cache_salt), show)
        with _progress("check") as show:
            reports = inventory.check(store, names, show)
        if delete:
            with _progress("delete") as show:
                for report in reports:
                    inventory.delete(store, report.bad_names, show)
                    report.deleted = len(report.bad_names)
    found = [report.as_dict() for report in reports]
    if as_json:
        click.echo(json.dumps(found))
    else:
        Console(highlight=False, soft_wrap=True).print(check_table(found))
        if delete:
            click.echo(f"{sum(one['deleted'] for one in found):,} names deleted")
    if any(one["damaged"] for one in found):
        raise click.exceptions.Exit(_DAMAGED)


def check_table(found: list[dict[str, Any]]) -> Table:
    """A row per tenant."""
    columns = ("good", "tokens", "damaged", "missing_parts", "writing", "places", "lost_places")
    labels = ("good", "tokens", "damaged", "incomplete", "in writing", "places", "lost")
    table = simple_table("tenant", *labels)
    for one in found:
        cells = [f"{one[name]:,}" for name in columns]
        if one["damaged"]:
            cells[2] = f"[red]{cells[2]}[/red]"
        table.add_row(one["tenant"][:_SHOWN_DIGITS], *cells)
    return table


@remote.command()
@address_argument
@salt_option
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def clear(address: str, cache_salt: str | None, yes: bool, as_json: bool) -> None:
    """Delete what kvboost stored at ADDRESS: of all models and tenants, or of one salt.

    Names that do not begin with "kvb:" are left alone.
    """
    from kvboost.remote import inventory

    whose = "all tenants" if cache_salt is None else "this salt"
    with _opened(address) as store:
        if not yes:
            click.confirm(f"Delete what {whose} stored at {store.name}?", abort=True, err=True)
        with _progress("names") as show:
            names = inventory.listed(store, _prefix(cache_salt), show)
        with _progress("delete") as show:
            inventory.delete(store, list(names), show)
    records = sum(each.records for each in inventory.holdings(names))
    size = sum(names.values())
    if as_json:
        click.echo(json.dumps({"records": records, "names": len(names), "bytes": size}))
    else:
        click.echo(f"{records:,} records deleted ({len(names):,} names, {size_in_words(size)})")


@contextmanager
def _opened(address: str) -> Iterator[ByteStore]:
    from kvboost.remote.byte_store import open_store

    store = open_store(address)
    try:
        yield store
    finally:
        store.close()


def _prefix(salt: str | None) -> str:
    from kvboost.remote.inventory import EVERYTHING
    from kvboost.remote.keys import tenant_prefix

    return EVERYTHING if salt is None else tenant_prefix(salt)


@contextmanager
def _progress(label: str) -> Iterator[Show]:
    """A bar on a terminal, gone when the work is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(label, total=None)

        def show(done: int, total: int | None) -> None:
            progress.update(task, completed=done, total=total)

        yield show
