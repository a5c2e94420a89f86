"""The command line, called in this process."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner, Result

from kvboost.cli.main import main


def kvboost(*arguments: str | Path, answer: str | None = None) -> Result:
    """What `kvboost ARGUMENTS` does; `answer` is what it reads."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=answer)
