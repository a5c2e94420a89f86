"""The benchmarks that are not installed: those in `benchmarks/` of the repository's checkout.

A checkout is looked for only where kvboost itself was imported from, never in the current folder, where the
code may be anybody's. Knows no benchmark.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from pathlib import Path

import click

import kvboost

PACKAGE = "benchmarks"
_PROJECT = 'name = "kvboost"'  # a line of [project] in the pyproject.toml


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
