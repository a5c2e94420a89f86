"""A user's own questions: texts, what is asked about them, and which answers are right.

They come as JSON lines or as a list of such mappings. All of them are checked before any is asked, and an
error names every line that cannot be used. Knows no model and no engine.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from kvboost.errors import InvalidRequestError

Source: TypeAlias = "str | os.PathLike[str] | Sequence[Mapping[str, Any] | Question]"
EXPECTED = ("contains", "regex", "choices")
FIELDS = ("documents", "question", *EXPECTED, "answer", "system", "id")
_MOST_SHOWN = 8  # bad lines in one error
_LONGEST_ID = 64  # characters; a longer word is a text, in a language without spaces


@dataclass(frozen=True)
class Question:
    """One question over `documents`, in the order in which the prompt has them.

    Exactly one of `contains` (any of these texts, in any case), `regex` and `choices` is there; with
    `choices`, `answer` is the number of the right one.
    """

    id: str
    documents: tuple[str, ...]
    question: str
    system: str = ""
    contains: tuple[str, ...] = ()
    regex: str = ""
    choices: tuple[str, ...] = ()
    answer: int = 0

    def is_right(self, said: str, chosen: int | None) -> bool:
        """Whether an answer's text, or the number of the choice that was taken, is what was expected."""
        if self.choices:
            return chosen == self.answer
        if self.regex:
            return re.search(self.regex, said) is not None
        return any(text.casefold() in said.casefold() for text in self.contains)

    @property
    def asked(self) -> str:
        """A digest of all that a model gets to see, and not of what is expected of it."""
        parts = [self.documents, self.system, self.question, self.choices]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def read_questions(source: Source) -> list[Question]:
    """The questions of a file of JSON lines, or of a list of mappings with the same fields.

    An entry with `document` and `id` is a text that questions further down may name by this id.
    """
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        entries, unit, where = _lines(path), "line", f" of {path}"
    elif isinstance(source, Sequence):
        entries, unit, where = enumerate(source, start=1), "item", ""
    else:
        raise InvalidRequestError(
            f"questions must be the path of a file of JSON lines or a list, got {type(source).__name__}"
        )
    texts: dict[str, str] = {}
    questions: list[Question] = []
    ids: set[str] = set()
    problems: list[str] = []
    for number, entry in entries:
        found = _read_or_why(entry, number, texts)
        if isinstance(found, Question) and found.id in ids:
            found = f'id: "{found.id}" is the id of another question; give it one of its own'
        if isinstance(found, Question):
            questions.append(found)
            ids.add(found.id)
        elif found:
            problems.append(f"{unit} {number}{where}: {found}")
    _raise(problems)
    if not questions:
        raise InvalidRequestError(
            'there are no questions; a question is {"documents": [...], "question": "...", "contains": "..."}'
        )
    return questions


class _UnusableError(Exception):
    """What is wrong with one entry: the field, and what to change."""


@dataclass(frozen=True)
class _NotJson:
    reason: str


def _raise(problems: list[str]) -> None:
    if problems:
        more = f"; and {len(problems) - _MOST_SHOWN} more" if len(problems) > _MOST_SHOWN else ""
        raise InvalidRequestError("; ".join(problems[:_MOST_SHOWN]) + more)


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Number and content of every line that is not empty; numbers begin with 1."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{path} is not UTF-8 text ({error}); save it as UTF-8") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                yield number, _NotJson(f"no JSON ({error}); write one object per line")


def _read_or_why(entry: Any, number: int, texts: dict[str, str]) -> Question | str | None:
    """A question; None for a document, which goes into `texts`; or why it is neither."""
    try:
        return entry if isinstance(entry, Question) else _read(entry, number, texts)
    except _UnusableError as problem:
        return str(problem)


def _read(entry: Any, number: int, texts: dict[str, str]) -> Question | None:
    if isinstance(entry, _NotJson):
        raise _UnusableError(entry.reason)
    if not isinstance(entry, Mapping):
        raise _UnusableError(f"expected an object with fields, got {type(entry).__name__}")
    if "document" in entry:
        _take_document(entry, texts)
        return None
    for name in entry:
        if name not in FIELDS:
            raise _UnusableError(f"{name}: no such field; a question has {', '.join(FIELDS)}")
    given = [name for name in EXPECTED if entry.get(name) is not None]
    if len(given) != 1:
        came = " and ".join(given) or "none"
        raise _UnusableError(
            f"needs exactly one of {', '.join(EXPECTED)} for the expected answer, got {came}"
        )
    if "answer" in entry and given != ["choices"]:
        raise _UnusableError(f'answer: goes with choices only; write the expected text into "{given[0]}"')
    choices = _texts(entry, "choices") if given == ["choices"] else ()
    return Question(
        id=_text({"id": str(number), **_without_none(entry)}, "id", numbers=True),
        documents=tuple(_document(name, texts) for name in _texts(entry, "documents")),
        question=_text(entry, "question"),
        system=_text(entry, "system") if entry.get("system") else "",
        contains=_texts(entry, "contains", alone=True) if given == ["contains"] else (),
        regex=_regex(entry) if given == ["regex"] else "",
        choices=choices,
        answer=_right_choice(entry, choices) if choices else 0,
    )


def _take_document(entry: Mapping[str, Any], texts: dict[str, str]) -> None:
    for name in entry:
        if name not in ("document", "id"):
            raise _UnusableError(f"{name}: no such field; a document has document and id")
    text, name = _text(entry, "document"), _text(entry, "id", numbers=True)
    if len(name.split()) != 1:
        raise _UnusableError(f'id: "{name}" has spaces in it, which make a text of it; take them out')
    if texts.setdefault(name, text) != text:
        raise _UnusableError(f'id: "{name}" is the id of another document; give it one of its own')


def _document(name: str, texts: Mapping[str, str]) -> str:
    """The text of an id, or a text as it stands: what is short and has no spaces is an id."""
    if name in texts:
        return texts[name]
    if len(name.split()) == 1 and len(name) <= _LONGEST_ID:
        known = ", ".join(texts) or "there is none"
        raise _UnusableError(
            f'documents: no document has the id "{name}" (known before this line: {known}); '
            'write {"document": "its text", "id": "' + name + '"} further up'
        )
    return name


def _text(entry: Mapping[str, Any], name: str, *, numbers: bool = False) -> str:
    value = entry.get(name)
    if numbers and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value.strip():
        raise _UnusableError(f"{name}: expected a text that is not empty, got {_shown(value)}")
    return value


def _texts(entry: Mapping[str, Any], name: str, *, alone: bool = False) -> tuple[str, ...]:
    """A list of texts; with `alone`, one text is a list of one."""
    value = entry.get(name)
    several = [value] if alone and isinstance(value, str) else value
    is_list = isinstance(several, Sequence) and not isinstance(several, str)
    if not is_list or not several or not all(isinstance(each, str) and each.strip() for each in several):
        wanted = "a text or a list of texts" if alone else "a list of texts"
        raise _UnusableError(f"{name}: expected {wanted}, none of them empty, got {_shown(value)}")
    return tuple(several)


def _regex(entry: Mapping[str, Any]) -> str:
    pattern = _text(entry, "regex")
    try:
        re.compile(pattern)
    except re.error as error:
        raise _UnusableError(f"regex: {pattern!r} is no regular expression ({error})") from error
    return pattern


def _right_choice(entry: Mapping[str, Any], choices: Sequence[str]) -> int:
    """The number of the right choice, given as number or as text."""
    if len(choices) < 2 or len(set(choices)) < len(choices):
        raise _UnusableError(f"choices: expected at least two different texts, got {_shown(list(choices))}")
    answer = entry.get("answer")
    if isinstance(answer, str) and answer in choices:
        return choices.index(answer)
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return answer
    raise _UnusableError(
        f"answer: expected one of the choices, or its number from 0 to {len(choices) - 1}, "
        f"got {_shown(answer)}"
    )


def _without_none(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if value is not None}


def _shown(value: Any, longest: int = 60) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= longest else text[: longest - 1] + "…"


def all_documents(questions: Iterable[Question]) -> int:
    """How many different documents the questions have."""
    return len({text for question in questions for text in question.documents})
