"""Options are declared once; names that nobody knows are errors."""

from __future__ import annotations

from typing import Any

import pytest

from kvboost.errors import InvalidRequestError
from kvboost.settings import (
    GROUPS,
    EngineArguments,
    EngineSettings,
    LoadingOptions,
    PretrainedArguments,
    options_of,
)


def checked(**given: Any) -> PretrainedArguments:
    return PretrainedArguments.checked("builtin", True, given)


def test_every_option_goes_to_the_one_that_knows_it() -> None:
    found = checked(dtype="bfloat16", chunk_size=64, revision="main", device="cpu", gguf_file="a.gguf")
    assert found.loading_options == {"dtype": "bfloat16", "revision": "main", "gguf_file": "a.gguf"}
    assert found.engine_options["chunk_size"] == 64
    assert found.engine_options["device"] == "cpu"
    assert not found.engine_options.keys() & found.loading_options.keys()


@pytest.mark.parametrize(
    "name", ["dtype", "gguf_file", "revision", "trust_remote_code", "attn_implementation", "torch_dtype"]
)
def test_the_loading_options_of_the_contract(name: str) -> None:
    assert checked(**{name: "given"}).loading_options == {name: "given"}


def test_an_unknown_option_is_named_with_those_that_are_known() -> None:
    with pytest.raises(InvalidRequestError, match="'chunk_sise'") as refused:
        checked(chunk_size=1, chunk_sise=2)
    assert "chunk_size" in str(refused.value)
    assert "revision" in str(refused.value)


def test_defaults_are_not_handed_to_transformers() -> None:
    assert checked().loading_options == {}


def test_a_bad_value_is_said_before_anything_is_loaded() -> None:
    with pytest.raises(InvalidRequestError, match="kv_cache_bits"):
        checked(bit_exact=True, kv_cache_bits=4)


def test_everything_that_is_shown_is_declared() -> None:
    for settings in (EngineSettings, EngineArguments, LoadingOptions):
        for each in options_of(settings):
            assert each.group in GROUPS
            assert each.help.endswith((".", "...", '"'))
            assert (each.kind == "choice") == bool(each.choices)


def test_settings_survive_a_round_trip() -> None:
    settings = EngineSettings(chunk_size=32, overlap_k=4, recompute_ratio="auto", max_kl=0.1)
    assert EngineSettings(**settings.engine_options) == settings
