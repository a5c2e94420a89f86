"""From text and ids to the ids that the model reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvboost.errors import InvalidRequestError
from kvboost.requests.prompts import PromptReader, TokenizedPrompt
from tests.unit.requests.reading import MakeTokenizer, ids_of, read, reader_of


def test_text_is_encoded_with_the_tokenizers_own_special_tokens(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(bos=True, eos=True)
    reader = reader_of(tokenizer)
    prompt = reader.read("ab the")
    assert list(prompt.token_ids) == ids_of(tokenizer, "<s>", "ab", "Ġ", "the", "</s>")
    assert prompt.text == "ab the"


def test_warming_drops_special_tokens_behind_the_text(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(bos=True, eos=True)
    reader = reader_of(tokenizer)
    assert read(reader, "ab", warming=True) == ids_of(tokenizer, "<s>", "ab")
    start = read(reader, "ab", warming=True)
    assert read(reader, "ab the")[: len(start)] == start, "a warmed text is a prefix of what goes on"


def test_warming_keeps_special_tokens_that_the_caller_wrote(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(bos=True)
    reader = reader_of(tokenizer)
    assert read(reader, "ab<|end|>", warming=True) == ids_of(tokenizer, "<s>", "ab", "<|end|>")


def test_warming_never_leaves_nothing(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(bos=True, eos=True)
    assert read(reader_of(tokenizer), "<s>", warming=True)


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, lambda ids: np.array(ids, np.uint16)])
def test_ids_come_in_many_forms(reader: PromptReader, kind: Callable[[list[int]], Any]) -> None:
    prompt = reader.read(kind([70, 71, 72]))
    assert list(prompt.token_ids) == [70, 71, 72]
    assert prompt.text == reader.decode([70, 71, 72])


def test_ids_are_taken_as_they_are(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(bos=True, eos=True)
    assert read(reader_of(tokenizer), [70, 1], warming=True) == [70, 1]
    last = len(tokenizer) - 1
    assert read(reader_of(tokenizer), [0, last]) == [0, last]


@pytest.mark.parametrize("wrong", [-1, 10_000, 2**40, -(2**40)])
def test_ids_outside_the_vocabulary_are_named(reader: PromptReader, wrong: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"token id {wrong} "):
        reader.read([1, wrong, 2])


def test_text_that_encodes_outside_the_models_vocabulary_is_refused(tokenizer: Any) -> None:
    """A tokenizer may know more tokens than the model has embeddings for."""
    beyond = ids_of(tokenizer, "the")[0]
    with pytest.raises(InvalidRequestError, match=f"token id {beyond} "):
        PromptReader(tokenizer, beyond).read("the")
    with pytest.raises(InvalidRequestError, match=f"token id {beyond} "):
        PromptReader(tokenizer, beyond).read([{"role": "user", "content": "the"}])


@pytest.mark.parametrize("empty", ["", [], (), np.array([], dtype=np.int64)])
def test_an_empty_prompt_is_refused(make_tokenizer: MakeTokenizer, empty: Any) -> None:
    for tokenizer in (make_tokenizer(), make_tokenizer(bos=True, eos=True)):
        with pytest.raises(InvalidRequestError, match="empty"):
            reader_of(tokenizer).read(empty)


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        7,
        3.5,
        b"text",
        [1.0, 2.0],
        [True, False],
        ["a", "b"],
        [[1, 2], [3, 4]],
        [[1, 2], [3]],
        [1, None],
        [1, {"role": "user", "content": "x"}],
        {"role": "user", "content": "x"},
        object(),
        [1, 2**63],
        [2**70],
    ],
)
def test_what_is_no_prompt_is_refused(reader: PromptReader, wrong: Any) -> None:
    with pytest.raises(InvalidRequestError):
        reader.read(wrong)


def test_decode_leaves_special_tokens_out(reader: PromptReader, tokenizer: Any) -> None:
    assert reader.decode(ids_of(tokenizer, "<s>", "ab", "<|end|>")) == "ab"


def test_length_is_that_of_the_ids() -> None:
    assert len(TokenizedPrompt(np.arange(5), "text")) == 5
