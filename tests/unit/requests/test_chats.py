"""From messages to ids: the template's text, with remembered answers as they were generated."""

from __future__ import annotations

from typing import Any

import pytest

from kvboost.errors import InvalidRequestError
from kvboost.requests import chats
from kvboost.requests.prompts import PromptReader
from tests.unit.requests.reading import USER, MakeTokenizer, assistant, ids_of, read, reader_of

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
    reader.answers.clear()
    assert read(reader, chat) == plain
    monkeypatch.setattr(chats, "_MAX_ANSWERS", 3)
    reader.remember_answer("ab", ids_of(tokenizer, "a", "b"), "")
    for number in range(3):
        reader.remember_answer(str(number), [70], "")
    assert read(reader, chat) == plain
    assert len(reader.answers) == 3


def test_an_answer_of_special_tokens_alone_is_not_remembered(reader: PromptReader, tokenizer: Any) -> None:
    reader.remember_answer("x", ids_of(tokenizer, "<|end|>"), "")
    reader.remember_answer("", ids_of(tokenizer, "a"), "")
    assert not reader.answers


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
