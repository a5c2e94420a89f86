"""What of the benchmarks is installed, and how `kvboost bench` finds the others: only in a checkout."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import click
import pytest

import kvboost
from benchmarks.suite.registry import COMMANDS
from kvboost.cli.bench import ELSEWHERE, bench, checkout_commands, find_checkout
from kvboost.cli.bench import PACKAGE as SUITE
from tests.cli.test_main import HEAVY

ROOT = Path(__file__).parents[2]
PACKAGE = Path(kvboost.__file__).parent
INSTALLED = {"compare", "prefix", "rag", "serve"}
MEASURING = {"prefix", "rag", "serve", "serve_load", "serve_numbers", "serve_servers"}
SHARED = {"__init__", "contestants", "plots", "record", "stream_client", "text"}
COMMAND = (sys.executable, "-c", "from kvboost.cli.main import main; main()")
FOREIGN = 'raise SystemExit("foreign code was run")\n'


def names(folder: Path, pattern: str) -> set[str]:
    return {path.stem for path in folder.glob(pattern)}


def ask(folder: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`kvboost` of the package in `folder`."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [*COMMAND, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)


def install(folder: Path) -> Path:
    """The package as a wheel would put it into `folder`."""
    shutil.copytree(PACKAGE, folder / "kvboost", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def write_benchmarks(folder: Path) -> None:
    """A package called like ours, of somebody else."""
    for name in ("__init__.py", "suite/__init__.py", "suite/registry.py"):
        path = folder / "benchmarks" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(FOREIGN)


# --- the wheel -----------------------------------------------------------------------------------


def test_the_wheel_holds_no_benchmark_but_the_four() -> None:
    wheel = (ROOT / "pyproject.toml").read_text().partition("[tool.hatch.build.targets.wheel]\n")[2]
    assert wheel.startswith('packages = ["src/kvboost"]\n\n')  # this folder, and no more of the repository
    assert names(PACKAGE / "bench", "**/*.py") == MEASURING | SHARED
    assert names(PACKAGE / "cli", "bench_*") == {f"bench_{name}" for name in (*INSTALLED, "view")}
    assert set(bench.commands) == INSTALLED


@pytest.mark.parametrize("beside", ["site-packages", "src"])
def test_installed_it_says_where_the_others_are(tmp_path: Path, beside: str) -> None:
    """A folder called benchmarks where it is run, or beside a copy of the package, is not looked at."""
    folder = install(tmp_path / "project" / beside)
    (folder.parent / "pyproject.toml").write_text('[project]\nname = "another"\n')
    write_benchmarks(folder.parent)
    helped = ask(folder, "bench", "--help", cwd=folder.parent)
    assert helped.returncode == 0, helped.stderr
    listed = helped.stdout.partition("Commands:\n")[2].splitlines()
    assert {line.split()[0] for line in listed[: len(INSTALLED)]} == INSTALLED
    assert listed[len(INSTALLED) :] == ["", ELSEWHERE]
    refused = ask(folder, "bench", "lookup", cwd=folder.parent)
    assert refused.returncode == 2
    assert f"No such command 'lookup'. {ELSEWHERE}" in " ".join(refused.stderr.split())


# --- a checkout ----------------------------------------------------------------------------------


def test_a_checkout_has_them_all_wherever_it_is_run(tmp_path: Path) -> None:
    write_benchmarks(tmp_path)
    helped = ask(PACKAGE.parent, "bench", "--help", cwd=tmp_path)
    assert helped.returncode == 0, helped.stderr
    listed = helped.stdout.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in listed] == sorted({*INSTALLED, *COMMANDS})
    assert ELSEWHERE not in helped.stdout
    unknown = ask(PACKAGE.parent, "bench", "nothing", cwd=tmp_path)
    assert unknown.returncode == 2
    assert "No such command 'nothing'." in unknown.stderr
    assert ELSEWHERE not in unknown.stderr


def test_every_module_of_a_command_is_listed() -> None:
    assert not INSTALLED & set(COMMANDS)
    modules = {str(command.callback.__module__).split(".")[-1] for command in COMMANDS.values()}
    assert modules | {"__init__"} == names(ROOT / "benchmarks" / "suite" / "commands", "*.py")


def test_help_needs_nothing_heavy() -> None:
    code = "import sys; from kvboost.cli.main import main; main(['bench', '--help'], standalone_mode=False); "
    code += "print(sorted(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(ast.literal_eval(found.stdout.splitlines()[-1]))
    assert "benchmarks.suite.registry" in loaded
    assert not loaded & HEAVY


@pytest.mark.parametrize(
    ("package", "files"),
    [
        ("src/kvboost", ("pyproject.toml",)),
        ("src/kvboost", ("benchmarks/__init__.py",)),
        ("lib/kvboost", ("pyproject.toml", "benchmarks/__init__.py")),
    ],
)
def test_a_checkout_is_known_by_all_its_marks(tmp_path: Path, package: str, files: tuple[str, ...]) -> None:
    (tmp_path / package).mkdir(parents=True)
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('name = "kvboost"\n')
    assert find_checkout(tmp_path / package) is None
    assert find_checkout(PACKAGE) == ROOT


def test_another_package_of_that_name_is_not_taken_for_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    other = ModuleType("benchmarks")
    other.__file__ = "/elsewhere/benchmarks/__init__.py"
    monkeypatch.setitem(sys.modules, SUITE, other)
    with pytest.raises(click.ClickException, match="another one is loaded: /elsewhere"):
        checkout_commands.__wrapped__()
