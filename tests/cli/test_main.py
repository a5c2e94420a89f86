"""The group: help, version, errors as one line, Ctrl-C, and quick start-up."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import kvboost.cli
from kvboost import __version__
from kvboost.cli.main import KVBoostGroup, in_one_line, main
from kvboost.errors import KVBoostError

HEAVY = {
    "torch",
    "transformers",
    "kvboost.engine",
    "kvboost.models",
    "kvboost.bench",
    "kvboost.loading.pretrained",
}

COMMANDS = [
    [],
    ["demo"],
    ["generate"],
    ["warm"],
    ["explain"],
    ["stats"],
    ["remote"],
    ["remote", "stats"],
    ["remote", "check"],
    ["remote", "clear"],
    ["bench"],
    ["bench", "prefix"],
    ["bench", "lookup"],
    ["bench", "eviction"],
]


def failing_group(error: BaseException) -> click.Group:
    @click.group(cls=KVBoostGroup)
    @click.option("--debug", is_flag=True)
    def group(debug: bool) -> None:
        """A group like the real one."""

    @group.command()
    def fail() -> None:
        raise error

    return group


@pytest.mark.parametrize("arguments", COMMANDS)
def test_every_command_has_help(arguments: list[str]) -> None:
    outcome = CliRunner().invoke(main, [*arguments, "--help"])
    assert outcome.exit_code == 0
    assert outcome.stdout.startswith("Usage: ")
    for command in ("demo", "generate", "warm", "explain", "stats", "bench") if not arguments else ():
        assert command in outcome.stdout


def test_version() -> None:
    outcome = CliRunner().invoke(main, ["--version"])
    assert outcome.stdout == f"kvboost, version {__version__}\n"


@pytest.mark.parametrize("error", [KVBoostError("too\n  long"), OSError("too long")])
def test_expected_errors_are_one_line(error: Exception) -> None:
    outcome = CliRunner().invoke(failing_group(error), ["fail"])
    assert (outcome.exit_code, outcome.stdout, outcome.stderr) == (1, "", "error: too long\n")


def test_error_is_red_on_a_terminal() -> None:
    outcome = CliRunner().invoke(failing_group(OSError("no")), ["fail"], color=True)
    assert outcome.stderr == "\x1b[31merror: no\x1b[0m\n"


def test_debug_lets_the_error_through() -> None:
    error = KVBoostError("seen")
    outcome = CliRunner().invoke(failing_group(error), ["--debug", "fail"])
    assert outcome.exception is error


def test_bugs_are_not_hidden() -> None:
    outcome = CliRunner().invoke(failing_group(ZeroDivisionError("a bug")), ["fail"])
    assert isinstance(outcome.exception, ZeroDivisionError)


def test_interrupt_exits_with_130() -> None:
    outcome = CliRunner().invoke(failing_group(KeyboardInterrupt()), ["fail"])
    assert (outcome.exit_code, outcome.stdout, outcome.stderr) == (130, "", "interrupted\n")


def test_an_error_without_text_has_a_name() -> None:
    assert in_one_line(OSError()) == "OSError"


def test_cli_modules_import_nothing_heavy_at_the_top() -> None:
    for path in Path(kvboost.cli.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names.append(node.module or "")
            heavy = [name for name in names for bad in HEAVY if name == bad or name.startswith(bad + ".")]
            assert not heavy, f"{path.name} imports {heavy} before a command runs"


def test_importing_kvboost_does_not_import_the_cli() -> None:
    code = "import sys, kvboost; print(sorted(m for m in sys.modules if m.startswith('kvboost.cli')))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
