"""`kvboost bench`: benchmarks as commands; a table for people, one line of JSON for programs.

Four are installed. All others are in `benchmarks/` of the repository and join the group where kvboost runs
from a checkout. That is looked for only where kvboost itself was imported from, never in the current folder,
where the code may be anybody's. Knows the commands by name only.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from pathlib import Path

import click

import kvboost
from kvboost.cli.bench_compare import compare
from kvboost.cli.bench_prefix import prefix
from kvboost.cli.bench_rag import rag
from kvboost.cli.bench_serve import serve

PACKAGE = "benchmarks"
_PROJECT = 'name = "kvboost"'  # a line of [project] in the pyproject.toml
ELSEWHERE = "All other benchmarks are only in a checkout of the repository."


def find_checkout(package: Path) -> Path | None:
    """The checkout whose `src/` holds the folder `package`; None for an installed one."""
    source = package.resolve().parent
    root = source.parent
    project = root / "pyproject.toml"
    if source.name != "src" or not (root / PACKAGE / "__init__.py").is_file() or not project.is_file():
        return None
    table = project.read_text(encoding="utf-8").partition("\n[project]\n")[2].partition("\n[")[0]
    return root if _PROJECT in table.splitlines() else None


@functools.cache
def checkout_commands() -> dict[str, click.Command] | None:
    """The benchmarks of the checkout by name; None where there is no checkout."""
    root = find_checkout(Path(kvboost.__file__).parent)
    if root is None:
        return None
    _load_package(root / PACKAGE)
    commands: dict[str, click.Command] = importlib.import_module(f"{PACKAGE}.suite.registry").COMMANDS
    return commands


def _load_package(folder: Path) -> None:
    """Make `folder` importable as `benchmarks`, and nothing else beside it."""
    if PACKAGE in sys.modules:
        found = sys.modules[PACKAGE].__file__
        if found is None or Path(found).resolve() != folder / "__init__.py":
            raise click.ClickException(
                f"expected the package {PACKAGE} of {folder}, another one is loaded: {found}"
            )
        return
    spec = importlib.util.spec_from_file_location(PACKAGE, folder / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = module
    spec.loader.exec_module(module)


class BenchGroup(click.Group):
    """The installed benchmarks, and those of the checkout if there is one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *(checkout_commands() or ())})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, cmd_name) or (checkout_commands() or {}).get(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if checkout_commands() is None and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"No such command {args[0]!r}. {ELSEWHERE}")
        return super().resolve_command(ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        if checkout_commands() is None:
            formatter.write_paragraph()
            formatter.write_text(ELSEWHERE)


@click.group(cls=BenchGroup)
def bench() -> None:
    """Measure on this machine. Every benchmark ends with one line of JSON."""


for command in (prefix, rag, serve, compare):
    bench.add_command(command)
