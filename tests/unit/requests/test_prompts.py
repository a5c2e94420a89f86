"""From text, ids and messages to the ids that the model reads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AddedToken

from kvboost.errors import InvalidRequestError, PromptTooLongError
from kvboost.requests import answers as answers_module
from kvboost.requests import chats, encoding
from kvboost.requests.encoding import ReadingBounds
from kvboost.requests.prompts import PromptReader, TokenizedPrompt

MakeTokenizer = Callable[..., Any]
USER = {"role": "user", "content": "say ab"}


def reader_of(tokenizer: Any) -> PromptReader:
    return PromptReader(tokenizer, len(tokenizer))


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer: MakeTokenizer) -> Any:
    return make_tokenizer()


@pytest.fixture
def reader(tokenizer: Any) -> PromptReader:
    return reader_of(tokenizer)


def ids_of(tokenizer: Any, *tokens: str) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(token) for token in tokens]


def read(reader: PromptReader, prompt: Any, **options: Any) -> list[int]:
    result = reader.read(prompt, **options)
    assert result.token_ids.dtype == np.int64
    assert len(result) == len(result.token_ids) > 0
    return list(result.token_ids)


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


# --- text and ids ----------------------------------------------------------------------------


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


# --- messages --------------------------------------------------------------------------------


def test_messages_are_rendered_without_adding_special_tokens_again(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(bos=True, eos=True)
    prompt = reader_of(tokenizer).read([USER])
    assert prompt.text == "<|start|>user\nsay ab<|end|><|start|>assistant\n"
    plain = tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
    assert list(prompt.token_ids) == plain
    assert not set(ids_of(tokenizer, "<s>", "</s>")) & set(plain)


def test_warming_messages_leaves_the_generation_prompt_out(reader: PromptReader) -> None:
    warmed = read(reader, [USER], warming=True)
    asked = read(reader, [USER])
    assert asked[: len(warmed)] == warmed
    assert len(asked) > len(warmed)
    assert reader.read([USER], warming=True).text == "<|start|>user\nsay ab<|end|>"


def test_an_answer_that_is_begun_is_continued(reader: PromptReader) -> None:
    assert reader.read([USER, assistant("the an")]).text.endswith("assistant\nthe an")
    assert reader.read([USER, assistant("the an")], warming=True).text.endswith("the an<|end|>")


@pytest.mark.parametrize(
    "wrong",
    [
        [{"role": "user"}],
        [{"content": "x"}],
        [USER, "text"],
        [USER, {"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        [{"role": 1, "content": "x"}],
    ],
)
def test_bad_messages_are_refused_by_number(reader: PromptReader, wrong: list[Any]) -> None:
    with pytest.raises(InvalidRequestError, match=f"message {len(wrong) - 1} "):
        reader.read(wrong)


def test_messages_need_a_template(make_tokenizer: MakeTokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="chat template"):
        reader_of(make_tokenizer(None)).read([USER])


def test_what_a_template_says_about_bad_messages_is_passed_on(make_tokenizer: MakeTokenizer) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        reader_of(make_tokenizer(template)).read([USER])
    with pytest.raises(InvalidRequestError, match="chat template"):
        reader_of(make_tokenizer("{% for %}")).read([USER])


# --- remembered answers ----------------------------------------------------------------------


def test_a_remembered_answer_is_spliced_in_as_it_was_generated(reader: PromptReader, tokenizer: Any) -> None:
    generated = ids_of(tokenizer, "a", "b", "Ġ", "t", "h", "e")  # re-encodes as ab, Ġ, the
    chat = [USER, assistant("ab the"), USER]
    plain = read(reader, chat)
    reader.remember_answer("ab the", [*generated, *ids_of(tokenizer, "<|end|>")], "")
    spliced = read(reader, chat)
    assert spliced != plain
    assert tokenizer.decode(spliced) == tokenizer.decode(plain)
    turn = read(reader, [USER])
    assert spliced[: len(turn) + len(generated)] == turn + generated, "the KV of the last turn is found again"
    assert reader.read(chat).text == tokenizer.decode(plain)


def test_several_answers_are_spliced_in_their_places(reader: PromptReader, tokenizer: Any) -> None:
    answers = {"ab": ("a", "b"), "the": ("th", "e"), "abab": ("ab", "a", "b")}
    for text, tokens in answers.items():
        reader.remember_answer(text, ids_of(tokenizer, *tokens), "")
    chat = []
    expected: list[int] = []
    for text, tokens in answers.items():
        chat += [USER, assistant(text)]
        expected += read(reader, [USER]) + ids_of(tokenizer, *tokens, "<|end|>")
    assert read(reader, [*chat, USER]) == expected + read(reader, [USER])


def test_the_same_answer_twice_in_one_chat(reader: PromptReader, tokenizer: Any) -> None:
    reader.remember_answer("ab", ids_of(tokenizer, "a", "b"), "")
    turn = read(reader, [USER]) + ids_of(tokenizer, "a", "b", "<|end|>")
    assert read(reader, [USER, assistant("ab"), USER, assistant("ab"), USER]) == turn * 2 + read(
        reader, [USER]
    )


def test_an_answer_is_only_known_to_its_own_salt(reader: PromptReader, tokenizer: Any) -> None:
    chat = [USER, assistant("ab"), USER]
    plain = read(reader, chat)
    reader.remember_answer("ab", ids_of(tokenizer, "a", "b"), "mine")
    assert read(reader, chat) == read(reader, chat, salt="theirs") == plain
    assert read(reader, chat, salt="mine") != plain


def test_only_the_assistants_words_are_spliced(reader: PromptReader, tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "ab"}]
    plain = read(reader, chat)
    reader.remember_answer("ab", ids_of(tokenizer, "a", "b"), "")
    assert read(reader, chat) == plain


def test_an_answer_to_be_continued_is_spliced_only_where_the_text_stays_the_same(
    reader: PromptReader, tokenizer: Any
) -> None:
    reader.remember_answer("ab", ids_of(tokenizer, "a", "b"), "")
    ids = read(reader, [USER, assistant("ab")])
    assert ids[-2:] == ids_of(tokenizer, "a", "b")
    assert tokenizer.decode(ids) == reader.read([USER, assistant("ab")]).text


def test_answers_are_forgotten_when_told_and_when_there_are_too_many(
    reader: PromptReader, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = [USER, assistant("ab"), USER]
    plain = read(reader, chat)
    reader.remember_answer("ab", ids_of(tokenizer, "a", "b"), "")
    reader.forget_answers()
    assert read(reader, chat) == plain
    monkeypatch.setattr(answers_module, "_MAX_ANSWERS", 3)
    reader.remember_answer("ab", ids_of(tokenizer, "a", "b"), "")
    for number in range(3):
        reader.remember_answer(str(number), [70], "")
    assert read(reader, chat) == plain
    assert len(reader._answers) == 3


def test_an_answer_of_special_tokens_alone_is_not_remembered(reader: PromptReader, tokenizer: Any) -> None:
    reader.remember_answer("x", ids_of(tokenizer, "<|end|>"), "")
    reader.remember_answer("", ids_of(tokenizer, "a"), "")
    assert not reader._answers


TRIMMING = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
REWRITING = TRIMMING.replace("m.content | trim", "m.content.split('</think>')[-1]")
LOOKING = TRIMMING.replace("m.content | trim", "('short' if m.content | length < 3 else m.content)")
DROPPING = TRIMMING.replace("m.content | trim", "(m.content if m.role == 'user' else '')")
TWICE = TRIMMING.replace("{{ m.content | trim }}<|end|>", "{{ m.content }}<|end|>{{ m.content }}<|end|>")


@pytest.mark.parametrize(
    ("template", "answer"),
    [
        (TRIMMING, " ab "),
        (REWRITING, "thoughts</think>ab"),
        (LOOKING, "ab"),
        (DROPPING, "ab"),
        (TWICE, "ab"),
    ],
    ids=["trimming", "rewriting", "looking", "dropping", "twice"],
)
def test_a_template_that_changes_an_answer_gets_its_own_text(
    make_tokenizer: MakeTokenizer, template: str, answer: str
) -> None:
    """Where splicing would give another text than the template does, the template's text is encoded."""
    tokenizer = make_tokenizer(template)
    reader = reader_of(tokenizer)
    chat = [USER, assistant(answer), USER]
    plain = reader.read(chat)
    singly = [tokenizer(letter, add_special_tokens=False)["input_ids"][0] for letter in answer]
    reader.remember_answer(answer, singly, "")
    spliced = reader.read(chat)
    assert spliced.text == plain.text
    assert tokenizer.decode(spliced.token_ids) == plain.text


def test_a_template_that_only_trims_around_lets_clean_answers_be_spliced(
    make_tokenizer: MakeTokenizer,
) -> None:
    tokenizer = make_tokenizer(TRIMMING)
    reader = reader_of(tokenizer)
    chat = [USER, assistant("ab"), USER]
    plain = read(reader, chat)
    reader.remember_answer("ab", ids_of(tokenizer, "a", "b"), "")
    assert read(reader, chat) != plain


def test_without_a_special_token_behind_the_answer_the_text_decides(make_tokenizer: MakeTokenizer) -> None:
    """What follows the answer might have merged with it: then the pieces must spell the same text."""
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}b{% endfor %}"
    tokenizer = make_tokenizer(template)
    reader = reader_of(tokenizer)
    chat = [USER, assistant("za"), USER]
    plain = read(reader, chat)
    assert ids_of(tokenizer, "ab")[0] in plain
    reader.remember_answer("za", ids_of(tokenizer, "z", "a"), "")
    spliced = read(reader, chat)
    assert tokenizer.decode(spliced) == tokenizer.decode(plain)


def test_a_message_that_looks_like_a_mark_does_no_harm(reader: PromptReader, tokenizer: Any) -> None:
    reader.remember_answer("ab", ids_of(tokenizer, "a", "b"), "")
    nasty = {"role": "user", "content": chats._MARK.format(1)}
    prompt = reader.read([nasty, assistant("ab"), nasty])
    assert tokenizer.decode(prompt.token_ids) == prompt.text


def test_decode_leaves_special_tokens_out(reader: PromptReader, tokenizer: Any) -> None:
    assert reader.decode(ids_of(tokenizer, "<s>", "ab", "<|end|>")) == "ab"


def test_length_is_that_of_the_ids() -> None:
    assert len(TokenizedPrompt(np.arange(5), "text")) == 5


# --- what reading may cost -------------------------------------------------------------------


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
