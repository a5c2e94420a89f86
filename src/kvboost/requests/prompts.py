"""From what a caller passes (text, token ids, chat messages) to the token ids the model reads.

Re-encoding an answer's text need not give the tokens that were generated. The reader remembers the ids of
its own answers and splices them in where the same answer comes back in messages, so that the next turn of a
chat finds its KV again. Whatever is spliced, the ids of a chat spell the template's text and have exactly
the control tokens (special ones, and others that are matched in text) that encoding it gives. Knows the
tokenizer, no model and no cache.
"""

from __future__ import annotations

import copy
import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from kvboost.errors import InvalidRequestError, PromptTooLongError
from kvboost.locks import fork_safe_lock

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]

_MAX_ANSWERS = 4_096
_MAX_ANSWER_BYTES = 64 << 20  # of all remembered answers: their ids, their texts and what keeps them
_ENTRY_BYTES = 400
_MARK = "\u2063kvboost{}\u2063"  # stands for an answer while a template is rendered
_MARKS = re.compile(_MARK.format("([0-9]+)"))
_SEAM_TOKENS = 8  # on each side of a seam, to see whether both sides are spelled there as they are alone
_LONG_TEXT = 65_536  # characters; encoding more takes a tenth of a second and more
_COMPARED = 2_000  # characters by which two tokenizers are compared
_COUNTED_FROM = 4  # characters per allowed token: a longer text is counted in slices before it is encoded
_SLICE = 16_384  # characters
_CUT_TOKENS = 128  # that a cut between two slices may add, and many more than it does


@dataclass(frozen=True)
class ReadingBounds:
    """What reading a prompt may cost, where others wait for theirs.

    More than `max_tokens` tokens are refused before they are all made. `go_on` is called between the parts
    of the work, and raises where it is to end. With `apart`, short texts do not wait for this one.
    """

    max_tokens: int | None = None
    go_on: Callable[[], None] = lambda: None
    apart: bool = False


UNBOUNDED = ReadingBounds()


class TokenizedPrompt:
    """`token_ids` `[tokens]` int64, and the text they stand for, which is made when it is asked for."""

    def __init__(self, token_ids: np.ndarray, text: str | Callable[[], str]) -> None:
        self.token_ids = token_ids
        self._text = text

    @property
    def text(self) -> str:
        if not isinstance(self._text, str):
            self._text = self._text()
        return self._text

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass
class _Answer:
    """An answer as it was generated; `is_spelled`: whether it may stand for its text, None = not known."""

    token_bytes: bytes  # 4 for each id
    size_bytes: int
    is_spelled: bool | None = None

    @property
    def token_ids(self) -> list[int]:
        ids: list[int] = np.frombuffer(self.token_bytes, dtype=np.int32).tolist()
        return ids


class _Answers:
    """Answers by salt and text. Where they get too many or too large, the salt that has the most gives up the
    one that it used least recently, so none can push out those of others. Thread-safe.
    """

    def __init__(self) -> None:
        self._by_salt: dict[str, OrderedDict[str, _Answer]] = {}
        self._counts: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._lock = fork_safe_lock(around_data=True)
        self._total = 0
        self.size_bytes = 0

    def __len__(self) -> int:
        return self._total

    def get(self, salt: str, text: str) -> _Answer | None:
        """The answer, which counts as used."""
        with self._lock:
            answers = self._by_salt.get(salt)
            if answers is None or text not in answers:
                return None
            answers.move_to_end(text)
            return answers[text]

    def put(self, salt: str, text: str, ids: Sequence[int]) -> None:
        """Keep an answer in place of an earlier one with this text."""
        packed = np.asarray(ids, dtype=np.int32).tobytes()
        size = len(packed) + sys.getsizeof(text) + sys.getsizeof(salt) + _ENTRY_BYTES
        if size > _MAX_ANSWER_BYTES:
            return
        with self._lock:
            self._drop(salt, text)
            self._by_salt.setdefault(salt, OrderedDict())[text] = _Answer(packed, size)
            self._book(salt, 1, size)
            while len(self) > _MAX_ANSWERS:
                self._drop_oldest(max(self._counts, key=self._counts.__getitem__))
            while self.size_bytes > _MAX_ANSWER_BYTES:
                self._drop_oldest(max(self._bytes, key=self._bytes.__getitem__))

    def clear(self) -> None:
        """Forget all of them."""
        with self._lock:
            for salt in list(self._by_salt):
                while salt in self._by_salt:
                    self._drop_oldest(salt)

    def _drop_oldest(self, salt: str) -> None:
        self._drop(salt, next(iter(self._by_salt[salt])))

    def _drop(self, salt: str, text: str) -> None:
        answers = self._by_salt.get(salt)
        answer = answers.pop(text, None) if answers is not None else None
        if answer is not None:
            self._book(salt, -1, -answer.size_bytes)

    def _book(self, salt: str, count: int, size: int) -> None:
        self._counts[salt] += count
        self._bytes[salt] += size
        self._total += count
        self.size_bytes += size
        if not self._counts[salt]:
            del self._by_salt[salt], self._counts[salt], self._bytes[salt]


class _ControlTokens:
    """Tokens that are no text of their own: special ones, and added ones, which are matched in text."""

    def __init__(self, tokenizer: Any) -> None:
        added = dict(getattr(tokenizer, "added_tokens_decoder", {}))
        special = frozenset(getattr(tokenizer, "all_special_ids", ()))
        self.special_ids = special | {token for token, what in added.items() if what.special}
        self.ids = self.special_ids | frozenset(added)
        names = {str(token) for token in getattr(tokenizer, "all_special_tokens", ())}
        texts = sorted(names | {str(what.content) for what in added.values()} - {""}, key=len, reverse=True)
        self.texts = tuple(texts)
        self._longest = max(map(len, texts), default=0)
        self._pattern = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        # Others are matched in a changed text, or depend on their neighbours: no look at a seam can tell.
        self.may_strip = any(what.lstrip or what.rstrip for what in added.values())
        self.are_literal = not any(what.normalized or what.single_word for what in added.values())

    def of(self, ids: Sequence[int]) -> list[int]:
        """Those among `ids`, in order."""
        return [token for token in ids if token in self.ids]

    def cross(self, before: str, after: str) -> bool:
        """Whether one would be found across the seam of two texts."""
        if not before or not after or not self.texts:
            return False
        tail, head = before[-self._longest :], after[: self._longest]
        around = tail + head
        for start in range(len(tail)):
            found = self._pattern.match(around, start)
            if found is not None and found.end() > len(tail):
                return True
        return False


class _Encoder:
    """A tokenizer for one thread at a time: fast ones fail where two encode at once."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._lock = fork_safe_lock()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        with self._lock:
            encoded = self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
        return list(encoded["input_ids"])

    def copied(self) -> _Encoder:
        with self._lock:
            return _Encoder(copy.deepcopy(self.tokenizer))

    def is_like(self, other: _Encoder, text: str) -> bool:
        """Whether both have the same tokens and parts, and read the beginning of `text` alike."""
        return _traits(self.tokenizer) == _traits(other.tokenizer) and all(
            self.encode(text[:_COMPARED], add_special_tokens=special)
            == other.encode(text[:_COMPARED], add_special_tokens=special)
            for special in (False, True)
        )


def _traits(tokenizer: Any) -> tuple[Any, ...]:
    """What a tokenizer reads by, beside its vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = [repr(getattr(backend, name, None)) for name in ("normalizer", "pre_tokenizer", "post_processor")]
    return len(tokenizer), getattr(tokenizer, "split_special_tokens", None), *parts


class PromptReader:
    """Tokenizes prompts and remembers answers, per salt and bounded."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._control = _ControlTokens(tokenizer)
        self._answers = _Answers()
        self._encoder = _Encoder(tokenizer)
        self._long_encoder: _Encoder | None = None  # for long texts, so that short ones do not wait for them

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that it reads with."""
        return self._tokenizer

    @property
    def answers_bytes(self) -> int:
        """Memory that remembered answers take."""
        return self._answers.size_bytes

    def read(
        self, prompt: Prompt, salt: str = "", *, warming: bool = False, bounds: ReadingBounds = UNBOUNDED
    ) -> TokenizedPrompt:
        """Tokenize `prompt`. With `warming`, leave out what only the end of a prompt has."""
        if isinstance(prompt, str):
            self._count(prompt, bounds)
            ids = self._encode(prompt, add_special_tokens=True, what="prompt", bounds=bounds)
            if warming:
                ids = self._without_trailing_special(ids, prompt)
            text = prompt
        elif _is_messages(prompt):
            ids, text = self._read_messages(_checked_messages(prompt), salt, warming, bounds)
        else:
            found = self._checked_ids(prompt)
            self._check(found)
            return TokenizedPrompt(found, lambda: str(self._tokenizer.decode(found.tolist())))
        if not text:  # a tokenizer may put special tokens around nothing
            ids = []
        tokens = np.asarray(ids, dtype=np.int64)
        self._check(tokens)
        return TokenizedPrompt(tokens, text)

    def read_continuation(self, prompt: Prompt, tokens: TokenizedPrompt, continuation: Prompt) -> list[int]:
        """The ids of `continuation` (text or ids) behind `prompt`, which reads as `tokens`.

        Text is encoded together with the prompt's, where that leaves the prompt's own tokens as they are.
        """
        ids: list[int] = []
        what = "continuation"
        if not isinstance(continuation, str):
            ids = self._checked_ids(continuation).tolist()
        else:
            check_text(continuation, f"the {what}")
            if isinstance(prompt, str):
                joined = self._encode(prompt + continuation, add_special_tokens=True, what=what)
                joined = self._without_trailing_special(joined, prompt + continuation)
                size = len(tokens)
                kept = len(joined) > size and joined[:size] == tokens.token_ids.tolist()
                ids = joined[size:] if kept else []
            ids = ids or self._encode(continuation, add_special_tokens=False, what=what)
        self._check(np.asarray(ids, dtype=np.int64), what)
        return ids

    def remember_answer(self, text: str, token_ids: Sequence[int], salt: str) -> None:
        """Keep the ids of an answer for when its text comes back in messages.

        One with special tokens inside is not kept: its text does not show them.
        """
        ids = list(token_ids)
        while ids and ids[-1] in self._control.special_ids:
            ids.pop()
        if ids and text and self._control.special_ids.isdisjoint(ids):
            self._answers.put(salt, text, ids)

    def forget_answers(self) -> None:
        """Drop all remembered answers."""
        self._answers.clear()

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of generated ids, special tokens left out."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _encode(
        self,
        text: str,
        *,
        add_special_tokens: bool,
        what: str = "chat",
        bounds: ReadingBounds = UNBOUNDED,
    ) -> list[int]:
        """The ids of `text`, which an error calls `what`."""
        check_text(text, f"the {what}")
        try:
            encoder = self._for_long_text(text) if bounds.apart and len(text) > _LONG_TEXT else self._encoder
            return encoder.encode(text, add_special_tokens=add_special_tokens)
        except MemoryError:
            raise
        except Exception as error:  # tokenizers raise what they like
            raise InvalidRequestError(f"the tokenizer refused the {what}: {error}") from error

    def _for_long_text(self, text: str) -> _Encoder:
        """A tokenizer of its own, made anew where the caller has changed the first one since."""
        if self._long_encoder is None or not self._long_encoder.is_like(self._encoder, text):
            self._long_encoder = self._encoder.copied()
        return self._long_encoder

    def _count(self, text: str, bounds: ReadingBounds) -> None:
        """Refuse a text that has too many tokens for certain, at the cost of so many and no more."""
        bounds.go_on()
        most = bounds.max_tokens
        if most is None or len(text) <= _COUNTED_FROM * most or self._control.may_strip:
            return
        at_least = 0
        for start in range(0, len(text), _SLICE):
            bounds.go_on()
            part = self._encode(text[start : start + _SLICE], add_special_tokens=False)
            at_least += max(0, len(part) - _CUT_TOKENS)
            if at_least > most:
                raise PromptTooLongError(most)

    def _spelled(self, token_ids: Sequence[int]) -> str:
        """The text of ids as it stands, with special tokens and every space."""
        return str(
            self._tokenizer.decode(
                list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def _without_trailing_special(self, ids: list[int], text: str) -> list[int]:
        """Drop special tokens that the tokenizer put behind the text."""
        if text.endswith(self._control.texts):
            return ids  # the caller wrote them
        end = len(ids)
        while end > 1 and ids[end - 1] in self._control.special_ids:
            end -= 1
        return ids[:end]

    def _check(self, ids: np.ndarray, what: str = "prompt") -> None:
        if not len(ids):
            raise InvalidRequestError(f"the {what} is empty; it needs at least one token")
        if (largest := int(ids.max())) >= self._vocab_size:
            raise InvalidRequestError(
                f"token id {largest} is outside the model's vocabulary (0 to {self._vocab_size - 1}); "
                "do tokenizer and model belong together?"
            )

    def _checked_ids(self, prompt: Any) -> np.ndarray:
        try:
            values = np.asarray(prompt)
        except (ValueError, TypeError) as error:
            raise InvalidRequestError(f"a prompt must be text, token ids or messages: {error}") from error
        if values.size == 0:
            return np.zeros(0, dtype=np.int64)
        if values.ndim != 1 or values.dtype.kind not in "iu":
            raise InvalidRequestError(
                "a prompt must be a string, a flat list of integer token ids, or a list of "
                f'{{"role", "content"}} messages; got {type(prompt).__name__} of {values.dtype}'
            )
        if values.min() < 0:
            raise InvalidRequestError(
                f"token id {values.min()} is outside the model's vocabulary (0 to {self._vocab_size - 1})"
            )
        return values.astype(np.int64)

    # --- chats -------------------------------------------------------------------------------

    def _read_messages(
        self, messages: list[dict[str, Any]], salt: str, warming: bool, bounds: ReadingBounds
    ) -> tuple[list[int], str]:
        bounds.go_on()
        text = self._render(messages, warming)
        self._count(text, bounds)
        answers = self._known_answers(messages, salt, bounds)
        if answers:
            spliced = self._splice(messages, answers, text, warming, bounds)
            if spliced is not None:
                return spliced, text
        return self._encode(text, add_special_tokens=False, bounds=bounds), text

    def _render(self, messages: list[dict[str, Any]], warming: bool) -> str:
        if not getattr(self._tokenizer, "chat_template", None):
            raise InvalidRequestError(
                "messages need a chat template, and this tokenizer has none; pass text instead"
            )
        continues = not warming and messages[-1]["role"] == "assistant"
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages,
                    tokenize=False,
                    add_generation_prompt=not warming and not continues,
                    continue_final_message=continues,
                )
            )
        except Exception as error:  # templates raise what they like; the caller sees which message
            raise InvalidRequestError(f"the chat template refused the messages: {error}") from error

    def _known_answers(
        self, messages: list[dict[str, Any]], salt: str, bounds: ReadingBounds
    ) -> dict[int, list[int]]:
        """The ids of those messages that are answers of ours, by the messages' numbers."""
        found = {}
        for index, message in enumerate(messages):
            text = message["content"]
            answer = self._answers.get(salt, text) if message["role"] == "assistant" else None
            if answer is None:
                continue
            ids = answer.token_ids
            if answer.is_spelled is None:
                bounds.go_on()
                answer.is_spelled = self._can_stand_for(ids, text)
            if answer.is_spelled:
                found[index] = ids
        return found

    def _can_stand_for(self, ids: list[int], text: str) -> bool:
        """Whether `ids` spell `text`, have the control tokens that encoding it gives, and hide nothing."""
        known = len(self._tokenizer)
        if any(token >= known for token in ids) or None in self._tokenizer.convert_ids_to_tokens(ids):
            return False  # decodes to nothing
        plain = self._encode(text, add_special_tokens=False)
        return self._control.of(ids) == self._control.of(plain) and self._spelled(ids) == text

    def _splice(
        self,
        messages: list[dict[str, Any]],
        answers: dict[int, list[int]],
        text: str,
        warming: bool,
        bounds: ReadingBounds,
    ) -> list[int] | None:
        """Token ids of `text` with remembered answers in their places; None where that is not safe."""
        bounds.go_on()
        marked = self._render(
            [
                {**message, "content": _MARK.format(index) if index in answers else message["content"]}
                for index, message in enumerate(messages)
            ],
            warming,
        )
        parts = _MARKS.split(marked)
        if parts[1::2] != [str(index) for index in answers]:
            return None  # left out, repeated, in another order, or a message has a mark of its own
        parts[1::2] = [messages[index]["content"] for index in answers]
        if "".join(parts) != text:
            return None  # the template looks into its messages or changes them
        pieces = []
        for part in parts[::2]:
            bounds.go_on()
            pieces.append(self._encode(part, add_special_tokens=False, bounds=bounds) if part else [])
        own = list(answers.values())
        ids = list(pieces[0])
        for answer, piece in zip(own, pieces[1:], strict=True):
            ids += answer
            ids += piece
        bounds.go_on()
        return ids if self._are_clean(parts, pieces, own) or self._is_same(ids, text, bounds) else None

    def _is_same(self, ids: list[int], text: str, bounds: ReadingBounds) -> bool:
        """Whether `ids` are what encoding `text` gives, but for where ordinary tokens end."""
        plain = self._encode(text, add_special_tokens=False, bounds=bounds)
        return self._control.of(ids) == self._control.of(plain) and self._spelled(ids) == self._spelled(plain)

    def _are_clean(self, parts: list[str], pieces: list[list[int]], answers: list[list[int]]) -> bool:
        """Whether encoding in pieces can change nothing, by a look at the seams alone.

        `parts` are texts, those of answers at odd places; `pieces` are the ids of the others. A control token
        follows each answer, none comes about at a seam, and no answer begins otherwise than it does alone.
        """
        if not self._control.are_literal:
            return False
        seams = zip(parts[::2], parts[1::2], parts[2::2], strict=False)
        for before, answer, after in seams:
            if not after.startswith(self._control.texts):
                return False
            if self._control.cross(before, answer) or self._control.cross(answer, after):
                return False
        return all(
            self._is_seamless(piece[-_SEAM_TOKENS:], answer[:_SEAM_TOKENS])
            for piece, answer in zip(pieces, answers, strict=False)
        )

    def _is_seamless(self, before: list[int], after: list[int]) -> bool:
        """Whether ids are spelled together as they are alone."""
        return not before or self._spelled(before + after) == self._spelled(before) + self._spelled(after)


def _is_messages(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _checked_messages(prompt: Any) -> list[dict[str, Any]]:
    messages = []
    for index, message in enumerate(prompt):
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise InvalidRequestError(f'message {index} must be a mapping with "role" and "content"')
        if not isinstance(message["content"], str) or not isinstance(message["role"], str):
            raise InvalidRequestError(f"message {index} must have text as its role and content")
        for part in ("role", "content"):
            check_text(message[part], f"the {part} of message {index}")
        messages.append(dict(message))
    return messages


def check_text(text: str, what: str) -> None:
    """Refuse what is a string and no text: halves of surrogate pairs, which nothing can encode."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X}"
        raise InvalidRequestError(
            f"{what} has half of a surrogate pair ({half}) at character {error.start}, "
            "which no tokenizer can read; decode the bytes that it came from with errors='replace', or pass "
            "text.encode('utf-16', 'surrogatepass').decode('utf-16', errors='replace')"
        ) from error
