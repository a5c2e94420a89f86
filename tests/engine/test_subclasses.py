"""Subclasses of the engine with constructors and defaults of their own."""

from __future__ import annotations

import typing
from typing import Any

import pytest

from kvboost import KVBoost
from tests.tiny_models import tiny_model


class Named(KVBoost):
    """An engine that is made from a name alone."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        super().__init__(tiny_model("llama"), tokenizer, chunk_size=16)
        self.name = name


class Small(KVBoost):
    """An engine with another default."""

    def __init__(self, model: Any, tokenizer: Any, chunk_size: int = 32, **options: Any) -> None:
        super().__init__(model, tokenizer, chunk_size, **options)


def test_a_constructor_of_its_own_is_not_called_for_checks(tokenizer: Any) -> None:
    with Named("mine", tokenizer) as engine:
        report = engine.verify_correctness(max_new_tokens=4)
        assert report.passed, str(report)


def test_defaults_of_its_own_hold_in_from_pretrained(tiny_folder: str) -> None:
    with Small.from_pretrained(tiny_folder) as engine:
        assert engine.chunk_size == 32
    with Small.from_pretrained(tiny_folder, chunk_size=64) as engine:
        assert engine.chunk_size == 64


def test_wrong_arguments_are_told_in_the_name_of_the_engine(tokenizer: Any) -> None:
    make: Any = KVBoost
    with pytest.raises(TypeError, match=r"InferenceEngine.__init__\(\) got an unexpected .* 'chunk_sise'"):
        make(tiny_model("llama"), tokenizer, chunk_sise=3)
    with pytest.raises(TypeError, match=r"InferenceEngine.__init__\(\) missing a required argument: 'model'"):
        make()


def test_type_hints_are_those_of_the_options() -> None:
    hints = typing.get_type_hints(KVBoost.__init__)
    assert hints["chunk_size"] is int
    assert hints["cache_salt"] is str
