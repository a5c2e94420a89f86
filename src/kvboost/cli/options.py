"""Options of settings as flags: made from their declarations, shown in groups, `--help` without torch.

A flag that is not given is not passed on: the default of the settings holds. Knows no engine.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import click
from click.core import ParameterSource

from kvboost.settings import GROUPS, EngineArguments, LoadingOptions, Option, options_of

Command = Callable[..., Any]
ENGINE_OPTIONS = tuple(options_of(EngineArguments))
LOADING_OPTIONS = tuple(options_of(LoadingOptions))
COUNT = click.IntRange(min=1)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


# --- how text becomes a value --------------------------------------------------------------------


def _number_or_word(
    value: Any, word: str, kind: type[Any], fits: Callable[[Any], bool], expected: str
) -> Any:
    """A number that fits, or None for the word."""
    if str(value).lower() == word:
        return None
    try:
        number = kind(value)
    except ValueError:
        number = None
    if number is None or not fits(number):
        raise click.BadParameter(f'expected {expected} or "{word}", got {value!r}')
    return number


def count_or_none(value: Any, least: float = 1) -> int | None:
    """A whole number of at least `least`, or None for the word none."""
    expected = f"a whole number of at least {least}"
    count: int | None = _number_or_word(value, "none", int, lambda count: count >= least, expected)
    return count


def size(value: Any, or_none: str = "", least: int = 1) -> int:
    """A number of bytes, with a unit if one likes: 4MB, 512KiB."""
    match = re.fullmatch(r"(\d+)\s*([kmg]?i?)b?", str(value).strip().lower())
    if match is None or match[2] not in _UNITS or int(match[1]) < least:
        raise click.BadParameter(f"expected a size of at least {least}, like 4MB{or_none}, got {value!r}")
    return int(match[1]) * _UNITS[match[2]]


def size_or_none(value: Any, least: int = 1) -> int | None:
    """A number of bytes, or None for the word none."""
    return None if str(value).lower() == "none" else size(value, ' or "none"', least)


def seconds_or_none(value: Any) -> float | None:
    """A time greater than 0, or None for the word none."""
    expected = "a time greater than 0"
    seconds: float | None = _number_or_word(value, "none", float, lambda seconds: seconds > 0, expected)
    return seconds


def ratio_or_auto(value: Any) -> float | str:
    """A number from 0 to 1, or the word auto."""
    ratio = _number_or_word(value, "auto", float, lambda ratio: 0 <= ratio <= 1, "a number from 0 to 1")
    return "auto" if ratio is None else float(ratio)


def bits(value: Any) -> int | str:
    """16, 8, 4 or the word k8v4."""
    word = str(value).lower()
    if word not in ("16", "8", "4", "k8v4"):
        raise click.BadParameter(f'expected 16, 8, 4 or "k8v4", got {value!r}')
    return word if word == "k8v4" else int(word)


def _named(function: Callable[..., Any], **fixed: Any) -> Callable[[Any], Any]:
    """`function` with some arguments, under a name that click can show."""
    named = partial(function, **fixed)
    named.__name__ = function.__name__  # type: ignore[attr-defined]
    return named


def _type_of(each: Option) -> tuple[Any, str | None]:
    """What click takes for an option, and how its value is called in `--help`."""
    if each.kind == "choice":
        return click.Choice(each.choices), None
    if each.kind == "count":
        most = None if each.most is None else int(each.most)
        return click.IntRange(int(each.least or 0), most), "N"
    if each.kind == "count or none":
        return _named(count_or_none, least=max(1, int(each.least or 0))), "N|none"
    if each.kind == "size or none":  # elsewhere 0 would be a budget that holds nothing
        least = 0 if each.name == "gpu_cache_bytes" else 1
        return _named(size_or_none, least=least), "SIZE|none"
    if each.kind == "seconds":
        return click.FloatRange(each.least or 0, min_open=each.least is None), "SECONDS"
    return {
        "text": (str, "TEXT"),
        "several texts": (str, "TEXT"),
        "switch": (bool, None),
        "number": (float, "NUMBER"),
        "size": (size, "SIZE"),
        "seconds or none": (seconds_or_none, "SECONDS|none"),
        "share or auto": (ratio_or_auto, "SHARE|auto"),
        "bits": (bits, "16|8|4|k8v4"),
        "folder": (click.Path(file_okay=False), "FOLDER"),
    }[each.kind]


# --- flags ---------------------------------------------------------------------------------------


def setting(
    flag: str, default: Any, says: str, kind: Any = COUNT, **more: Any
) -> Callable[[Command], Command]:
    """An option with a default that `--help` shows; a count unless `kind` says what else."""
    return click.option(flag, type=kind, default=default, show_default=True, help=says, **more)


model_option = setting("--model", "builtin", 'A hub name, a folder, or "builtin".', str)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead.")


class GroupedOption(click.Option):
    """An option that `--help` shows under its group."""

    def __init__(self, *args: Any, group: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


class GroupedCommand(click.Command):
    """A command whose `--help` shows its own options first, then those of every group."""

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        shown: dict[str, list[tuple[str, str]]] = {"": [], **{group: [] for group in GROUPS}}
        for each in self.get_params(context):
            record = each.get_help_record(context) if isinstance(each, click.Option) else None
            if record is not None:
                shown[getattr(each, "group", "")].append(record)
        for group, records in shown.items():
            if records:
                with formatter.section(f"{group} options".strip().capitalize()):
                    formatter.write_dl(records)


def spelling(each: Option) -> str:
    """The flag of an option, as click takes it."""
    flag = each.flag or "--" + each.name.replace("_", "-")
    if each.kind != "switch" or each.default is False:
        return flag
    return f"{flag}/--no-{flag[2:]}"


def _decorator(each: Option) -> Callable[[Command], Command]:
    kind, metavar = _type_of(each)
    default = getattr(each.default, "value", each.default)  # an enum's
    return click.option(
        spelling(each),
        each.name,
        cls=GroupedOption,
        group=each.group,
        type=kind,
        is_flag=each.kind == "switch",
        multiple=each.kind == "several texts",
        metavar=each.metavar or metavar,
        default=default,
        show_default=each.default_text or (each.kind != "several texts" and default is not None),
        help=each.help,
    )


def flags_of(options: Iterable[Option], name: str) -> Callable[[Command], Command]:
    """Add a flag for each of `options` to a command, which gets those that were given as the dict `name`."""
    chosen = tuple(options)

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def with_options(**arguments: Any) -> Any:
            context = click.get_current_context()
            values = {each.name: arguments.pop(each.name) for each in chosen}
            given = {
                option: value
                for option, value in values.items()
                if context.get_parameter_source(option) is not ParameterSource.DEFAULT
            }
            return command(**arguments, **{name: given})

        decorated: Command = with_options
        for each in reversed(chosen):
            decorated = _decorator(each)(decorated)
        return decorated

    return decorate


def engine_options(command: Command) -> Command:
    """Add every flag of engine and loading; the command gets those that were given as `engine_options`."""
    return engine_options_with()(command)


def engine_options_with(**default_texts: str) -> Callable[[Command], Command]:
    """The same for a command whose defaults differ from the engine's: option = what `--help` says instead."""
    order = {group: number for number, group in enumerate(GROUPS)}
    options = sorted((*LOADING_OPTIONS, *ENGINE_OPTIONS), key=lambda each: order[each.group])
    told = [replace(each, default_text=default_texts.get(each.name, each.default_text)) for each in options]
    return flags_of(told, "engine_options")
