"""Text that no tokenizer can read is refused by name and place; text that is only odd is read."""

from __future__ import annotations

from typing import Any

import pytest

from kvboost.errors import InvalidRequestError
from kvboost.requests.prompts import PromptReader
from tests.fixture_types import MakeEngine
from tests.tiny_models import tiny_tokenizer

LONE = ["\ud800", "\udc80x"]


@pytest.mark.parametrize("lone", LONE, ids=ascii)
@pytest.mark.parametrize("call", ["generate", "warm", "explain", "stream", "pin", "tokenize", "prepare"])
def test_half_of_a_surrogate_pair_in_a_prompt(make_engine: MakeEngine, call: str, lone: str) -> None:
    engine = make_engine()
    with pytest.raises(
        InvalidRequestError, match=r"the prompt .*\(U\+D[8-F]\w\w\) at character 3\b.*errors="
    ):
        list(getattr(engine, call)(f"ab {lone}") or [])


@pytest.mark.parametrize("call", ["generate_batch", "generate_many"])
def test_half_of_a_surrogate_pair_among_many_prompts(make_engine: MakeEngine, call: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"prompt 1: the prompt .* at character 0\b"):
        getattr(make_engine(), call)(["fine", "\ud800"], 2)


def test_half_of_a_surrogate_pair_in_messages(make_engine: MakeEngine) -> None:
    engine = make_engine()
    user = {"role": "user", "content": "ask"}
    with pytest.raises(InvalidRequestError, match=r"the content of message 1 .* at character 2\b"):
        engine.generate([user, {"role": "user", "content": "no\ud83d"}], 2)
    with pytest.raises(InvalidRequestError, match=r"the role of message 0 .* at character 0\b"):
        engine.generate([{"role": "\ud83d", "content": "x"}], 2)


def test_half_of_a_surrogate_pair_in_what_a_template_reads_besides() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['name'] }}{{ m['content'] }}{% endfor %}"
    with pytest.raises(InvalidRequestError, match=r"the chat .* at character 3\b"):
        PromptReader(tokenizer, 320).read([{"role": "user", "content": "x", "name": "abc\udead"}])


def test_half_of_a_surrogate_pair_in_a_continuation(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for prompt in ("what is scored", [7, 8, 9], [{"role": "user", "content": "ask"}]):
        with pytest.raises(InvalidRequestError, match=r"prompt 0: the continuation .* at character 4\b"):
            engine.score([prompt], ["good\ud800"])
    with pytest.raises(InvalidRequestError, match=r"prompt 0: the prompt .* at character 0\b"):
        engine.score(["\ud800"], ["good"])


@pytest.mark.parametrize(
    "text",
    [
        "\0",
        "a\0b",
        "\ufffd",
        "\uffff",
        "\U0010ffff",
        "\u202e",
        "\u2063",
        "\ufeff",
        "e\u0301" * 40,
        "👩‍👩‍👧",
        "\r\n\t",
        " ",
    ],
    ids=ascii,
)
@pytest.mark.usefixtures("approximate_reuse")
def test_odd_text_is_read(make_engine: MakeEngine, text: str) -> None:
    engine = make_engine()
    assert len(engine.generate(text, 2).token_ids) >= 1
    asked = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": text},
        {"role": "user", "content": "x"},
    ]
    assert engine.generate(asked, 2).prompt.count(text) >= 1
    assert engine.score(["x"], [text])[0].continuation == text


def test_what_a_tokenizer_raises_is_told() -> None:
    """Tokenizers raise what they like: bare exceptions for a word that they cannot encode."""

    class Refusing:
        """A tokenizer that cannot encode digits."""

        def __init__(self, tokenizer: Any) -> None:
            self._tokenizer = tokenizer

        def __getattr__(self, name: str) -> Any:
            return getattr(self._tokenizer, name)

        def __len__(self) -> int:
            return len(self._tokenizer)

        def __call__(self, text: str, **options: Any) -> Any:
            if "7" in text:
                raise Exception("WordLevel error: Missing [UNK] token from the vocabulary")
            return self._tokenizer(text, **options)

    reader = PromptReader(Refusing(tiny_tokenizer()), 320)
    assert len(reader.read("abc")) == 3
    with pytest.raises(
        InvalidRequestError, match=r"tokenizer refused the prompt: WordLevel error: Missing \[UNK\]"
    ):
        reader.read("ab7")
    with pytest.raises(InvalidRequestError, match="tokenizer refused the continuation: WordLevel error"):
        reader.read_continuation("abc", reader.read("abc"), "7")
    with pytest.raises(InvalidRequestError, match="tokenizer refused the chat: WordLevel error"):
        reader.read([{"role": "user", "content": "7"}])


@pytest.mark.parametrize("call", ["generate", "generate_batch"])
def test_stop_strings_that_are_no_text(make_engine: MakeEngine, call: str) -> None:
    engine = make_engine()
    prompt: Any = "ask" if call == "generate" else ["ask", "again"]
    with pytest.raises(InvalidRequestError, match=r"stop string 1 .* at character 1\b"):
        getattr(engine, call)(prompt, 2, stop_strings=["fine", "x\ud800"])
    for wrong in (7, [7], [None], {"a": 1}.items()):
        with pytest.raises(InvalidRequestError, match="stop_strings must be a text or a list of texts"):
            getattr(engine, call)(prompt, 2, stop_strings=wrong)
    for none in ([], (), None):
        assert getattr(engine, call)(prompt, 2, stop_strings=none)
    assert getattr(engine, call)(prompt, 2, stop_strings="x")
