"""What was answered, line by line in a file, so that a run that was cut off goes on where it stopped.

Each line stands under the digest of all that the answer depends on. A line that is damaged, as the last one
may be where a process was killed, counts as never written. Knows no questions.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from kvboost.errors import CacheFileError

_HEAD = {"format": "kvboost-answers", "version": 1}


@dataclass(frozen=True)
class LoggedAnswer:
    """One answer of one contestant: its text or the choice it took, its first token, its prompt's tokens."""

    key: str
    id: str
    mode: str
    ratio: float | None
    answer: str
    chosen: int | None
    ttft_ms: float
    prompt_tokens: int
    cached_tokens: int
    recomputed_tokens: int


class AnswerLog:
    """Answers by key; those that are added go into the file at once, if there is one."""

    def __init__(self, answers: dict[str, LoggedAnswer], file: TextIO | None) -> None:
        self._answers = answers
        self._file = file

    def get(self, key: str) -> LoggedAnswer | None:
        return self._answers.get(key)

    def add(self, answer: LoggedAnswer) -> None:
        self._answers[answer.key] = answer
        if self._file is not None:
            self._file.write(json.dumps(dataclasses.asdict(answer)) + "\n")
            self._file.flush()


@contextmanager
def opened_log(path: Path | None) -> Iterator[AnswerLog]:
    """The log in `path`, which is made where there is none; None = it is kept nowhere."""
    if path is None:
        yield AnswerLog({}, None)
        return
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    answers = _read(text, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Where nothing but a part of the head was written, it is written again.
    with path.open("a" if answers is not None else "w", encoding="utf-8") as file:
        if answers is None:
            file.write(json.dumps(_HEAD) + "\n")
        elif not text.endswith("\n"):
            file.write("\n")
        yield AnswerLog(answers or {}, file)


def _read(text: str, path: Path) -> dict[str, LoggedAnswer] | None:
    """The answers in a file's text; None where it has not even a head."""
    head, _, rest = text.partition("\n")
    if _parsed(head) != _HEAD:
        if json.dumps(_HEAD).startswith(text):
            return None
        raise CacheFileError(
            f"{path} is no file of answers that this version writes, and is left as it is; "
            "give another name, or remove it"
        )
    found = (_answer(_parsed(line)) for line in rest.split("\n"))
    return {answer.key: answer for answer in found if answer is not None}


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _answer(value: Any) -> LoggedAnswer | None:
    """The answer that a line holds, if it is whole."""
    kinds = {
        "key": str,
        "id": str,
        "mode": str,
        "ratio": (float, int, type(None)),
        "answer": str,
        "chosen": (int, type(None)),
        "ttft_ms": (float, int),
        "prompt_tokens": int,
        "cached_tokens": int,
        "recomputed_tokens": int,
    }
    if not isinstance(value, dict) or value.keys() != kinds.keys():
        return None
    if not all(isinstance(value[name], kind) for name, kind in kinds.items()):  # type: ignore[arg-type]
        return None
    return LoggedAnswer(**value)
