"""Chat messages to token ids: the template's text, with remembered answers in their places.

Whatever is spliced, the ids spell the template's text and have exactly the control tokens (special ones, and
others that are matched in text) that encoding it gives. Knows the tokenizer and its template, no model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvboost.errors import InvalidRequestError
from kvboost.requests.answers import RememberedAnswers
from kvboost.requests.encoding import ReadingBounds, TextEncoder, check_text

_MARK = "\u2063kvboost{}\u2063"  # stands for an answer while a template is rendered
_MARKS = re.compile(_MARK.format("([0-9]+)"))
_SEAM_TOKENS = 8  # compared on each side of a seam: are both sides spelled as they are alone?


class ChatReader:
    """Reads messages with `encoder`, and splices in what is found in `answers`."""

    def __init__(self, encoder: TextEncoder, answers: RememberedAnswers) -> None:
        self._encoder = encoder
        self._answers = answers
        self._tokenizer = encoder.tokenizer
        self._control = encoder.control
        self._spelled = encoder.spelled

    def read(
        self, messages: list[dict[str, Any]], salt: str, warming: bool, bounds: ReadingBounds
    ) -> tuple[list[int], str]:
        """The ids of checked messages, and the template's text. With `warming`, no answer is asked for."""
        bounds.go_on()
        text = self._render(messages, warming)
        self._encoder.check_length(text, bounds)
        answers = self._known_answers(messages, salt, bounds)
        if answers:
            spliced = self._splice(messages, answers, text, warming, bounds)
            if spliced is not None:
                return spliced, text
        return self._encoder.encode(text, add_special_tokens=False, bounds=bounds), text

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
        except Exception as error:  # templates raise what they like
            raise InvalidRequestError(f"the chat template refused the messages: {error}") from error

    def _known_answers(
        self, messages: list[dict[str, Any]], salt: str, bounds: ReadingBounds
    ) -> dict[int, list[int]]:
        """The ids of the messages that are remembered answers, by message number."""
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
        """Whether `ids` spell `text`, with the control tokens that encoding it gives and no hidden token."""
        known = len(self._tokenizer)
        if any(token >= known for token in ids) or None in self._tokenizer.convert_ids_to_tokens(ids):
            return False  # decodes to nothing
        plain = self._encoder.encode(text, add_special_tokens=False)
        return self._control.of(ids) == self._control.of(plain) and self._spelled(ids) == text

    def _splice(
        self,
        messages: list[dict[str, Any]],
        answers: dict[int, list[int]],
        text: str,
        warming: bool,
        bounds: ReadingBounds,
    ) -> list[int] | None:
        """Token ids of `text` with remembered answers in their places; None if that is not safe."""
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
            pieces.append(self._encoder.encode(part, add_special_tokens=False, bounds=bounds) if part else [])
        own = list(answers.values())
        ids = list(pieces[0])
        for answer, piece in zip(own, pieces[1:], strict=True):
            ids += answer
            ids += piece
        bounds.go_on()
        return ids if self._are_clean(parts, pieces, own) or self._is_same(ids, text, bounds) else None

    def _is_same(self, ids: list[int], text: str, bounds: ReadingBounds) -> bool:
        """Whether `ids` equal an encoding of `text`, apart from where ordinary tokens end."""
        plain = self._encoder.encode(text, add_special_tokens=False, bounds=bounds)
        return self._control.of(ids) == self._control.of(plain) and self._spelled(ids) == self._spelled(plain)

    def _are_clean(self, parts: list[str], pieces: list[list[int]], answers: list[list[int]]) -> bool:
        """Whether a look at the seams alone shows that encoding in pieces changes nothing.

        `parts` are texts, with answers at the odd places; `pieces` are the ids of the others. A control token
        must follow each answer, none may arise at a seam, and each answer must begin as it does alone.
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
        """Whether both spell the same text together as they do alone."""
        return not before or self._spelled(before + after) == self._spelled(before) + self._spelled(after)


def is_messages(prompt: Any) -> bool:
    """Whether a prompt is a chat."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def checked_messages(prompt: Any) -> list[dict[str, Any]]:
    """Copies of messages that have text as role and content; others are refused by number."""
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
