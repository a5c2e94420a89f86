"""Detokenizing token by token: whole characters only, stop strings, the bytes of a token.

Every step costs the same, however long the answer is. Knows a tokenizer's `decode`, no request.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

Decode = Callable[[list[int]], str]

_INCOMPLETE = "\ufffd"  # what half a character decodes to
_LONGEST_CHARACTER = 4  # bytes, so at most so many tokens
_LONG_WAIT = 8  # tokens without a whole character: these bytes will never be one
_GIVE_UP = 32
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Detokenizer:
    """Turns tokens into pieces of text that add up to the text of all of them.

    A token's text depends on its neighbours: a character may need several tokens, and many decoders drop a
    space at the start. So tokens are decoded behind those whose text went out last, and wait until the end
    of the text is a whole character.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._before: list[int] = []  # tokens whose text was given out
        self._before_text = ""
        self._waiting: list[int] = []

    def add(self, token: int) -> str:
        """The text that is certain with this token, which may be empty."""
        self._waiting.append(token)
        text = self._decode(self._before + self._waiting)
        if text.endswith(_INCOMPLETE):
            return self._settled() if len(self._waiting) > _LONG_WAIT else ""
        return self._give_out(text, len(self._waiting))

    def end(self) -> str:
        """The rest, with U+FFFD in place of half a character."""
        return self._give_out(self._decode(self._before + self._waiting), len(self._waiting))

    def _give_out(self, text: str, count: int) -> str:
        """Give out the first `count` waiting tokens, whose text behind those before is `text`."""
        tokens, self._waiting = self._waiting[:count], self._waiting[count:]
        goes_on = text.startswith(self._before_text)  # otherwise the decoder has changed its earlier text
        new = text[len(self._before_text) :] if goes_on else self._decode(tokens)
        if new or len(self._before) + len(tokens) > _GIVE_UP:
            self._before = tokens
            self._before_text = self._decode(tokens)
        else:  # they have no text, and the next one would be decoded as if it came first
            self._before = self._before + tokens
            self._before_text = text
        return new

    def _settled(self) -> str:
        """Of bytes that make no character: all but those at the end that still may.

        Tokens can be told apart where the texts of both sides add up to that of the whole.
        """
        waiting = self._waiting
        whole = self._decode(waiting)
        for cut in range(len(waiting) - 1, len(waiting) - 1 - _LONGEST_CHARACTER, -1):
            if self._decode(waiting[:cut]) + self._decode(waiting[cut:]) == whole:
                return self._give_out(self._decode(self._before + waiting[:cut]), cut)
        return self.end() if len(waiting) > _GIVE_UP else ""


class StopFinder:
    """Lets text through up to the first stop string, and holds back what may become one.

    What it does depends on the text only, not on the pieces that it comes in.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _fallbacks(stop)) for stop in dict.fromkeys(stops)]
        self._matched = [0] * len(self._stops)  # characters at the end of the text that begin each stop
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        """The part of the text so far that can be sent now."""
        if not self._stops or self.found:
            return "" if self.found else text
        said = self._held + text
        for at, character in enumerate(text, start=len(self._held)):
            if longest := self._advance(character):
                self.found = True
                self._held = ""
                return said[: at + 1 - longest]
        keep = len(said) - max(self._matched)
        self._held = said[keep:]
        return said[:keep]

    def end(self) -> str:
        """What was held back and is not a stop string after all."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> int:
        """Take one character; returns the length of the longest stop string that it completes."""
        longest = 0
        for number, (stop, fallbacks) in enumerate(self._stops):
            matched = self._matched[number]
            while matched and stop[matched] != character:
                matched = fallbacks[matched - 1]
            matched += stop[matched] == character
            if matched == len(stop):
                longest = max(longest, matched)
                matched = fallbacks[matched - 1]
            self._matched[number] = matched
        return longest


def _fallbacks(stop: str) -> list[int]:
    """For each beginning of `stop`: how many of its last characters begin `stop` again."""
    table = [0]
    for character in stop[1:]:
        matched = table[-1]
        while matched and stop[matched] != character:
            matched = table[matched - 1]
        table.append(matched + (stop[matched] == character))
    return table


class TokenNames:
    """How single tokens are shown: their bytes, and a text even where they are half a character."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._byte_of = _byte_alphabet()
        self.bytes_of = lru_cache(maxsize=65_536)(self._bytes_of)

    def name_of(self, token: int) -> str:
        """Its text, or its bytes spelled out where they are no text, or its number where it has none."""
        raw = self.bytes_of(token)
        if not raw:
            return f"token:{token}"
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _bytes_of(self, token: int) -> bytes:
        spelled = self._tokenizer.convert_ids_to_tokens(token)
        if spelled is None:  # the model has more embeddings than the tokenizer has tokens
            return b""
        alone = str(self._tokenizer.decode([token]))
        if all(character in self._byte_of for character in spelled):
            raw = bytes(self._byte_of[character] for character in spelled)
            if raw.decode(errors="replace") == alone:
                return raw
        if byte := _BYTE_TOKEN.fullmatch(spelled):
            return bytes([int(byte[1], 16)])
        twice = str(self._tokenizer.decode([token, token]))  # the first token of a text may lose its space
        if twice.startswith(alone) and len(twice) > 2 * len(alone):
            return twice[len(alone) :].encode()
        return alone.encode()


def _byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level tokenizers spell bytes."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}
