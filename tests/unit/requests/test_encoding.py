"""What reading may cost: bounds, long texts apart from short ones, tokenizers that change."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from transformers import AddedToken

from kvboost.errors import PromptTooLongError
from kvboost.requests import encoding
from kvboost.requests.encoding import ReadingBounds
from kvboost.requests.prompts import PromptReader
from tests.unit.requests.reading import USER, MakeTokenizer, assistant, reader_of


class Counting:
    """A tokenizer that notes how many characters it was given at a time."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.lengths: list[int] = []

    def __call__(self, text: str, **options: Any) -> Any:
        self.lengths.append(len(text))
        return self._tokenizer(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_tokenizer"], name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __deepcopy__(self, _memo: Any) -> Counting:
        return Counting(self._tokenizer)


def test_a_text_that_cannot_fit_costs_no_more_than_one_that_does(tokenizer: Any) -> None:
    counting = Counting(tokenizer)
    reader = reader_of(counting)
    bounds = ReadingBounds(max_tokens=1_000)
    with pytest.raises(PromptTooLongError, match="more than the 1000 tokens"):
        reader.read("a" * 4_000_000, bounds=bounds)
    assert sum(counting.lengths) <= 2 * encoding._SLICE
    chat = [USER, {"role": "user", "content": "a" * 4_000_000}]
    with pytest.raises(PromptTooLongError):
        reader.read(chat, bounds=bounds)
    assert sum(counting.lengths) <= 4 * encoding._SLICE


def test_bounds_do_not_change_what_is_read(tokenizer: Any) -> None:
    bounds = ReadingBounds(max_tokens=300_000, apart=True)
    for length in (10, encoding._LONG_TEXT + 5, 400_000):
        text = "abc " * (length // 4)
        plain, bounded = reader_of(tokenizer).read(text), reader_of(tokenizer).read(text, bounds=bounds)
        assert plain.token_ids.tolist() == bounded.token_ids.tolist()


def test_a_text_within_its_bounds_is_never_refused(tokenizer: Any) -> None:
    """Cutting adds tokens, which must not count."""
    text = "ab" * 100_000
    count = len(reader_of(tokenizer).read(text))
    found = reader_of(tokenizer).read(text, bounds=ReadingBounds(max_tokens=count))
    assert len(found) == count


def test_reading_ends_when_it_is_told_to(reader: PromptReader) -> None:
    calls = iter(range(100))

    def stop_at(number: int) -> None:
        if next(calls) >= number:
            raise InterruptedError

    answers = {f"a{number}": [5, 6] for number in range(50)}
    for text, ids in answers.items():
        reader.remember_answer(text, ids, "")
    chat = [message for text in answers for message in (USER, assistant(text))]
    with pytest.raises(InterruptedError):
        reader.read([*chat, USER], bounds=ReadingBounds(go_on=lambda: stop_at(20)))


def test_short_texts_do_not_wait_for_long_ones(tokenizer: Any) -> None:
    reading, go_on = threading.Event(), threading.Event()

    class Slow(Counting):
        def __call__(self, text: str, **options: Any) -> Any:
            if len(text) > encoding._LONG_TEXT:
                reading.set()
                assert go_on.wait(10)
            return super().__call__(text, **options)

        def __deepcopy__(self, _memo: Any) -> Slow:
            return Slow(self._tokenizer)

    reader = reader_of(Slow(tokenizer))
    bounds = ReadingBounds(apart=True)
    thread = threading.Thread(target=lambda: reader.read("a" * 200_000, bounds=bounds))
    thread.start()
    assert reading.wait(10)
    assert len(reader.read("ab", bounds=bounds))  # would wait for ever
    go_on.set()
    thread.join(10)
    assert not thread.is_alive()


def test_a_tokenizer_that_was_changed_reads_long_texts_as_it_is_now(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer()
    reader = PromptReader(tokenizer, len(tokenizer) + 10)
    bounds = ReadingBounds(apart=True)
    text = "ab " * 30_000 + "wxyzzy"
    before = reader.read(text, bounds=bounds).token_ids.tolist()
    tokenizer.add_tokens(["wxyzzy"])
    after = reader.read(text, bounds=bounds).token_ids.tolist()
    assert after != before
    assert after == tokenizer(text)["input_ids"]


def test_blanks_that_a_token_swallows_are_not_counted(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken("wxyzzy", rstrip=True)])
    text = "wxyzzy" + " " * 40_000 + "ab"
    reader = reader_of(tokenizer)
    plain = reader.read(text).token_ids.tolist()
    assert len(plain) < 10
    assert reader.read(text, bounds=ReadingBounds(max_tokens=1_000)).token_ids.tolist() == plain


def test_a_tokenizer_whose_parts_were_changed_reads_long_texts_as_it_is_now(
    make_tokenizer: MakeTokenizer,
) -> None:
    tokenizer = make_tokenizer()
    reader = reader_of(tokenizer)
    bounds = ReadingBounds(apart=True)
    text = "ab " * 30_000 + "</s>b"
    reader.read(text, bounds=bounds)
    tokenizer.split_special_tokens = True
    after = reader.read(text, bounds=bounds).token_ids.tolist()
    assert after == tokenizer(text)["input_ids"]
