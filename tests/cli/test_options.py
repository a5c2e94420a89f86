"""The flags are the engine's options: names, defaults, and what reaches the engine."""

from __future__ import annotations

import inspect
from typing import Any

import click
import pytest
from click.testing import CliRunner

from kvboost.choices import GenerationMode
from kvboost.cli.generate import MODES
from kvboost.cli.main import main
from kvboost.cli.options import ENGINE_OPTIONS, LOADING_OPTIONS, engine_options
from kvboost.engine import InferenceEngine
from kvboost.settings import PretrainedArguments

PARAMETERS = inspect.signature(InferenceEngine.__init__).parameters


def given(*arguments: str) -> dict[str, Any]:
    """What a command gets as `engine_options`."""
    seen: dict[str, Any] = {}

    @click.command()
    @engine_options
    def command(engine_options: dict[str, Any]) -> None:
        seen.update(engine_options)

    outcome = CliRunner().invoke(command, list(arguments), catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.stderr
    return seen


def test_every_engine_option_is_a_flag() -> None:
    names = {each.name for each in ENGINE_OPTIONS}
    assert names == set(PARAMETERS) - {"self", "model", "tokenizer"}


@pytest.mark.parametrize("each", ENGINE_OPTIONS, ids=lambda each: each.name)
def test_flags_show_the_engines_defaults(each: Any) -> None:
    assert each.default == PARAMETERS[each.name].default


def test_loading_flags_are_loading_options() -> None:
    names = {each.name for each in LOADING_OPTIONS}
    found = PretrainedArguments.checked("builtin", True, dict.fromkeys(names, "given")).loading_options
    assert found.keys() == names


def test_help_shows_options_in_groups() -> None:
    shown = CliRunner().invoke(main, ["serve", "--help"]).output
    headings = ["Options:", "Model options:", "Cache options:", "Reuse options:", "Serving options:"]
    places = [shown.index(f"\n{heading}") for heading in [*headings, "Advanced options:"]]
    assert places == sorted(places)
    cache = shown[places[2] : places[3]]
    assert "--max-cache-bytes SIZE|none" in cache
    assert "--disk-cache-dir FOLDER" in cache


def test_modes_are_the_engines() -> None:
    assert set(MODES) == {mode.value for mode in GenerationMode}
    assert inspect.signature(InferenceEngine.generate).parameters["mode"].default.value == MODES[0]


def test_what_is_not_given_is_not_passed_on() -> None:
    assert given() == {}


def test_values_arrive_as_the_engine_takes_them() -> None:
    assert given(
        "--chunk-size",
        "64",
        "--max-chunks",
        "none",
        "--max-cache-bytes",
        "1000",
        "--bit-exact",
        "--no-strict",
    ) == {"chunk_size": 64, "max_chunks": None, "max_cache_bytes": 1000, "bit_exact": True, "strict": False}
    assert given("--dtype", "bfloat16", "--trust-remote-code", "--device", "cpu") == {
        "dtype": "bfloat16",
        "trust_remote_code": True,
        "device": "cpu",
    }


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--chunk-size", "0"], "--chunk-size"),
        (["--max-chunks", "few"], '"none"'),
        (["--max-cache-bytes", "-1"], '"none"'),
        (["--cache-device", "disk"], "--cache-device"),
        (["--kv-cache-bits", "5"], "--kv-cache-bits"),
    ],
)
def test_bad_values_are_usage_errors(arguments: list[str], named: str) -> None:
    @click.command()
    @engine_options
    def command(engine_options: dict[str, Any]) -> None:
        raise AssertionError(engine_options)

    outcome = CliRunner().invoke(command, arguments)
    assert outcome.exit_code == 2
    assert named in outcome.stderr


@pytest.mark.parametrize(("given", "code"), [("0", 1), ("4MB", 1), ("none", 1), ("-1", 2), ("much", 2)])
def test_no_copies_on_a_gpu_are_asked_for_with_0(given: str, code: int) -> None:
    outcome = CliRunner().invoke(main, ["generate", "no/such/model", "x", "--gpu-cache-bytes", given])
    assert outcome.exit_code == code
    assert code == 1 or "at least 0" in outcome.stderr
