"""Answers in a file: kept line by line, found again, and a damaged line is one that was never written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvboost.errors import CacheFileError
from kvboost.proof.answer_log import LoggedAnswer, opened_log

ONE = LoggedAnswer("key 1", "q1", "baseline", None, "said\n“so”", None, 12.5, 100, 0, 0)
TWO = replace(ONE, key="key 2", mode="chunk_kv_reuse", ratio=0.15, chosen=1, cached_tokens=90)


def log_with(path: Path, *answers: LoggedAnswer) -> str:
    with opened_log(path) as log:
        for answer in answers:
            log.add(answer)
    return path.read_text(encoding="utf-8")


def test_answers_are_found_again(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "answers.jsonl"
    log_with(path, ONE)
    log_with(path, TWO)
    with opened_log(path) as log:
        assert (log.get("key 1"), log.get("key 2"), log.get("key 3")) == (ONE, TWO, None)


def test_each_is_in_the_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with opened_log(path) as log:
        log.add(ONE)
        assert '"key 1"' in path.read_text(encoding="utf-8")


def test_without_a_file() -> None:
    with opened_log(None) as log:
        log.add(ONE)
        assert log.get("key 1") == ONE


@pytest.mark.parametrize("cut", [1, 2, 30, 200])
def test_a_last_line_that_was_cut_off_is_written_anew(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "answers.jsonl"
    whole = log_with(path, ONE, TWO)
    path.write_text(whole[:-cut], encoding="utf-8")
    with opened_log(path) as log:
        assert log.get("key 1") == ONE
        assert log.get("key 2") == (TWO if cut == 1 else None)
    log_with(path, TWO)
    with opened_log(path) as log:
        assert (log.get("key 1"), log.get("key 2")) == (ONE, TWO)


@pytest.mark.parametrize("length", [0, 5, 20])
def test_a_head_that_was_cut_off(tmp_path: Path, length: int) -> None:
    path = tmp_path / "answers.jsonl"
    whole = log_with(path, ONE)
    path.write_text(whole[:length], encoding="utf-8")
    assert log_with(path, ONE) == whole


@pytest.mark.parametrize("line", ["5", "{}", '{"key": 5}', "nonsense", '{"key": "key 1", "id": "q1"}'])
def test_lines_that_hold_no_answer_are_passed_over(tmp_path: Path, line: str) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(log_with(path) + line + "\n", encoding="utf-8")
    log_with(path, TWO)
    with opened_log(path) as log:
        assert (log.get("key 1"), log.get("key 2")) == (None, TWO)


@pytest.mark.parametrize("text", ["my notes\n", '{"format": "kvboost-answers", "version": 2}\n'])
def test_a_file_of_something_else_is_left_as_it_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(text)
    with pytest.raises(CacheFileError, match="give another name"), opened_log(path):
        pass
    assert path.read_text() == text
