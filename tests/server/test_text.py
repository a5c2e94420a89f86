"""Text out of tokens: pieces add up, no half characters, stop strings wherever they fall."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from kvboost.server.tokens import Detokenizer, StopFinder, TokenNames
from tests.tiny_models import tiny_tokenizer

BYTES = tiny_tokenizer()  # a token per byte
FIRST_BYTE = 6  # behind the special tokens; bytes are in the order of their spelling


TOKEN_OF = {TokenNames(BYTES).bytes_of(token)[0]: token for token in range(FIRST_BYTE, FIRST_BYTE + 256)}


def byte_ids(raw: bytes) -> list[int]:
    return [TOKEN_OF[byte] for byte in raw]


def sentencepiece() -> Any:
    """Words that begin with a mark for the space, and bytes for what is no word."""
    words = ["<unk>", "▁Hello", "▁world", "ing", "!", "▁", "é", "▁日本", "\n", "▁a"]
    vocab = {
        token: index for index, token in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", clean_up_tokenization_spaces=False
    )


SENTENCEPIECE = sentencepiece()
FIRST_FALLBACK = 10


def pieces_of(tokenizer: Any, ids: list[int]) -> list[str]:
    def decode(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    detokenizer = Detokenizer(decode)
    return [*(detokenizer.add(token) for token in ids), detokenizer.end()]


@given(st.lists(st.integers(0, 265), max_size=60))
@example([0xF0 + FIRST_BYTE] * 50)
@settings(max_examples=300, deadline=None)
def test_pieces_of_any_bytes_add_up(ids: list[int]) -> None:
    expected = BYTES.decode(ids, skip_special_tokens=True)
    assert "".join(pieces_of(BYTES, ids)) == expected


@given(st.text(max_size=30))
@settings(max_examples=200, deadline=None)
def test_text_comes_in_whole_characters(text: str) -> None:
    pieces = pieces_of(BYTES, byte_ids(text.encode()))
    assert "".join(pieces) == text
    sent = 0
    for piece, byte in zip(pieces, range(1, len(text.encode()) + 1), strict=False):
        sent += len(piece.encode())
        assert sent <= byte
        assert "\ufffd" not in piece or "\ufffd" in text


@given(st.lists(st.one_of(st.integers(0, 9), st.sampled_from("é日🎉\n")), max_size=30))
@settings(max_examples=200, deadline=None)
def test_spaces_at_the_start_of_words_and_bytes_for_rare_characters(parts: list[int | str]) -> None:
    ids: list[int] = []
    for part in parts:
        ids += [part] if isinstance(part, int) else [FIRST_FALLBACK + byte for byte in part.encode()]
    assert "".join(pieces_of(SENTENCEPIECE, ids)) == SENTENCEPIECE.decode(ids, skip_special_tokens=True)


def test_half_a_character_at_the_end_is_marked() -> None:
    ids = byte_ids("aé".encode()[:-1])
    assert pieces_of(BYTES, ids) == ["a", "", "\ufffd"]


def test_every_step_costs_the_same() -> None:
    longest = 0

    def decode(tokens: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return str(BYTES.decode(tokens, skip_special_tokens=True))

    detokenizer = Detokenizer(decode)
    text = ("日本語 and English, " * 30).encode() + b"\xff" * 200
    for token in byte_ids(text):
        detokenizer.add(token)
    assert longest < 32


# --- stop strings ----------------------------------------------------------------------------


def expected_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """The text before the stop string that is complete first; of several at once before the longest."""
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        return text, False
    end = min(ends)
    return text[: end - max(len(stop) for stop in stops if text[:end].endswith(stop))], True


@given(
    st.text("ab", max_size=40),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    st.lists(st.integers(1, 6), min_size=40, max_size=40),
)
@settings(max_examples=500, deadline=None)
def test_stop_strings_do_not_depend_on_the_pieces(text: str, stops: list[str], sizes: list[int]) -> None:
    finder = StopFinder(stops)
    said, at = "", 0
    for size in sizes:
        said += finder.add(text[at : at + size])
        at += size
        assert all(stop not in said for stop in stops)
    said += finder.end()
    assert (said, finder.found) == expected_stop(text, stops)


def test_nothing_is_held_back_without_need() -> None:
    finder = StopFinder(["###", "\n\n"])
    assert [finder.add(piece) for piece in ("a", "#", "b\n", "c##", "d")] == ["a", "", "#b", "\nc", "##d"]
    assert (finder.end(), finder.found) == ("", False)
    assert [finder.add(piece) for piece in ("#", "##x", "y")] == ["", "", ""]
    assert (finder.end(), finder.found) == ("", True)


# --- single tokens ---------------------------------------------------------------------------


def test_names_of_bytes() -> None:
    names = TokenNames(BYTES)
    assert {names.bytes_of(token) for token in range(6, 262)} == {bytes([byte]) for byte in range(256)}
    assert names.name_of(byte_ids(b"a")[0]) == "a"
    assert names.name_of(byte_ids(b" ")[0]) == " "
    assert names.name_of(byte_ids(b"\xe6")[0]) == "bytes:\\xe6"
    assert names.name_of(2) == "</s>"
    assert names.bytes_of(300) == b""  # the model has more embeddings than the tokenizer has tokens


@pytest.mark.parametrize(
    ("token", "raw"),
    [(1, b" Hello"), (3, b"ing"), (5, b" "), (6, "é".encode()), (7, " 日本".encode()), (10 + 0xE6, b"\xe6")],
)
def test_names_of_words(token: int, raw: bytes) -> None:
    assert TokenNames(SENTENCEPIECE).bytes_of(token) == raw
