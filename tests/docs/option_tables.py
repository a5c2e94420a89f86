"""The tables of options in the docs, made from the declarations.

`python -m tests.docs.option_tables` writes them into the pages; a test compares the two.
"""

from __future__ import annotations

import re
from pathlib import Path

import click

from kvboost.cli.main import main
from kvboost.cli.options import ENGINE_OPTIONS, LOADING_OPTIONS
from kvboost.settings import EngineArguments, Option, options_of

DOCS = Path(__file__).parents[2] / "docs"
BEGIN, END = "<!-- made by tests/docs/option_tables.py -->", "<!-- end of what is made -->"


def in_python(text: str) -> str:
    """What a flag's help says, in the words of a Python call."""
    text = re.sub(r"--([a-z-]+)", lambda flag: f"`{flag[1].replace('-', '_')}`", text)
    return text.replace('"none"', "`None`").replace("`recompute_ratio` auto", '`recompute_ratio="auto"`')


def _default(each: Option) -> str:
    value = getattr(each.default, "value", each.default)
    shown = f'"{value}"' if isinstance(value, str) else repr(value)
    says_more = each.default_text not in ("", "none", "empty")
    return f"`{shown}`" + (f" ({each.default_text})" if says_more else "")


def engine_table() -> str:
    """Every option of the constructor."""
    rows = [
        f"| `{each.name}` | {_default(each)} | {in_python(each.help)} |"
        for each in options_of(EngineArguments)
    ]
    return "\n".join(["| option | default | what it does |", "| --- | --- | --- |", *rows])


def server_table() -> str:
    """Every flag of `kvboost serve` that is not the engine's."""
    shared = {each.name for each in (*ENGINE_OPTIONS, *LOADING_OPTIONS)} | {"model"}
    rows = []
    for flag in main.commands["serve"].params:
        if flag.name in shared or not isinstance(flag, click.Option):
            continue
        spelled = "/".join([*flag.opts, *flag.secondary_opts])
        rows.append(f"| `{spelled}` | {_flag_default(flag)} | {flag.help} |")
    return "\n".join(["| flag | default | what it does |", "| --- | --- | --- |", *rows])


def _flag_default(flag: click.Option) -> str:
    if isinstance(flag.show_default, str):
        return flag.show_default
    if flag.is_flag:
        return "on" if flag.default else "off"
    if flag.default is None or flag.multiple:
        return "none"
    return f"`{flag.default:g}`" if isinstance(flag.default, float) else f"`{flag.default}`"


def with_tables(page: str, table: str) -> str:
    """`page` with `table` between the two marks."""
    before, rest = page.split(BEGIN, 1)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.split(END, 1)[1]}"


PAGES = {"options.md": engine_table, "server.md": server_table}


if __name__ == "__main__":
    for name, table in PAGES.items():
        path = DOCS / name
        path.write_text(with_tables(path.read_text(), table()))
