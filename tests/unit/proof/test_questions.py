"""Questions of a user's own: what they may look like, what is said about those that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvboost.errors import InvalidRequestError
from kvboost.proof.questions import Question, read_questions

PLAIN = {"documents": ["a text of its own"], "question": "what?", "contains": "x"}


def written(path: Path, *lines: Any) -> Path:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_with_documents_and_all_kinds_of_answers(tmp_path: Path) -> None:
    path = written(
        tmp_path / "q.jsonl",
        {"document": "first text", "id": "a"},
        {"document": "second text", "id": 2},
        "",
        {"documents": ["2", "a"], "question": "q1", "contains": "x", "system": "be brief", "id": "one"},
        {"documents": ["a", "a whole text"], "question": "q2", "contains": ["x", "y"]},
        {"documents": ["a"], "question": "q3", "regex": "[0-9]+", "id": "seven"},
        {"documents": ["a"], "question": "q4", "choices": ["no", "yes"], "answer": "yes"},
        {"documents": ["a"], "question": "q5", "choices": ["no", "yes"], "answer": 0, "contains": None},
    )
    found = read_questions(path)
    assert [question.id for question in found] == ["one", "5", "seven", "7", "8"]
    assert [question.documents for question in found[:2]] == [
        ("second text", "first text"),
        ("first text", "a whole text"),
    ]
    assert found[0].system == "be brief"
    assert found[1].contains == ("x", "y")
    assert [(question.choices, question.answer) for question in found[3:]] == [
        (("no", "yes"), 1),
        (("no", "yes"), 0),
    ]


def test_a_list_is_read_like_a_file() -> None:
    (one, two) = read_questions([{"document": "the text", "id": "a"}, {**PLAIN, "documents": ["a"]}, PLAIN])
    assert one.documents == ("the text",)
    assert (one.id, two.id) == ("2", "3")
    assert read_questions([one, two]) == [one, two]


@pytest.mark.parametrize(
    ("question", "said", "chosen", "right"),
    [
        ({"contains": ("Osei",)}, "It was GRETA OSEI.", None, True),
        ({"contains": ("Osei",)}, "Nobody knows.", None, False),
        ({"contains": ("18:40", "6:40 pm")}, "at 6:40 PM", None, True),
        ({"regex": r"\b46\b"}, "46 cars", None, True),
        ({"regex": r"\b46\b"}, "460 cars", None, False),
        ({"regex": "(?i)beech"}, "Beech", None, True),
        ({"choices": ("a", "b"), "answer": 1}, "a", 1, True),
        ({"choices": ("a", "b"), "answer": 1}, "b", 0, False),
    ],
)
def test_judging(question: dict[str, Any], said: str, chosen: int | None, right: bool) -> None:
    assert Question("1", ("text",), "q", **question).is_right(said, chosen) is right


def test_the_digest_is_of_what_is_asked_and_not_of_what_is_expected() -> None:
    plain = Question("1", ("text",), "q", contains=("x",))
    assert plain.asked == Question("2", ("text",), "q", contains=("y",)).asked
    others = [
        Question("1", ("text", "more"), "q"),
        Question("1", ("text",), "q?"),
        Question("1", ("text",), "q", system="s"),
        Question("1", ("text",), "q", choices=("a", "b")),
    ]
    assert len({plain.asked, *(each.asked for each in others)}) == 5


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("nonsense", "line 2 of .*: no JSON .*one object per line"),
        ("[1]", "line 2 of .*: expected an object with fields, got list"),
        ({**PLAIN, "contain": 1}, "contain: no such field; a question has documents"),
        ({"documents": ["a b"], "question": "q"}, "exactly one of contains, regex, choices.* got none"),
        ({**PLAIN, "regex": "x"}, "exactly one of .* got contains and regex"),
        ({**PLAIN, "answer": "x"}, "answer: goes with choices only"),
        ({**PLAIN, "documents": "a b"}, "documents: expected a list of texts"),
        ({**PLAIN, "documents": []}, "documents: expected a list of texts"),
        ({**PLAIN, "documents": ["missing"]}, 'documents: no document has the id "missing"'),
        ({**PLAIN, "question": " "}, "question: expected a text that is not empty"),
        ({**PLAIN, "contains": 5}, "contains: expected a text or a list of texts.*got 5"),
        ({**PLAIN, "contains": ["x", ""]}, "contains: expected a text or a list of texts"),
        ({**PLAIN, "contains": None, "regex": "("}, "regex: .* is no regular expression"),
        ({**PLAIN, "contains": None, "choices": ["a"], "answer": 0}, "choices: expected at least two"),
        ({**PLAIN, "contains": None, "choices": ["a", "a"], "answer": 0}, "choices: expected at least two"),
        (
            {**PLAIN, "contains": None, "choices": ["a", "b"]},
            "answer: expected one of the choices.*got nothing",
        ),
        ({**PLAIN, "contains": None, "choices": ["a", "b"], "answer": 2}, "number from 0 to 1, got 2"),
        ({**PLAIN, "system": 5}, "system: expected a text"),
        ({**PLAIN, "id": "one"}, 'id: "one" is the id of another question'),
        ({"document": "text"}, "id: expected a text"),
        ({"document": "text", "id": "with space"}, "has spaces in it"),
        ({"document": "text", "id": "a", "title": "x"}, "title: no such field; a document has"),
    ],
)
def test_bad_lines_are_named_with_field_and_remedy(tmp_path: Path, line: Any, words: str) -> None:
    path = written(tmp_path / "q.jsonl", {**PLAIN, "id": "one"}, line)
    with pytest.raises(InvalidRequestError, match=words):
        read_questions(path)


def test_all_bad_lines_are_named_at_once(tmp_path: Path) -> None:
    path = written(tmp_path / "q.jsonl", "nonsense", PLAIN, {**PLAIN, "question": 5})
    with pytest.raises(InvalidRequestError, match=r"line 1 of .*line 3 of .*question: expected"):
        read_questions(path)
    with pytest.raises(InvalidRequestError, match="and 12 more"):
        read_questions(written(path, *["nonsense"] * 20))


def test_two_documents_with_one_id() -> None:
    same = {"document": "text", "id": "a"}
    assert read_questions([same, same, PLAIN])
    with pytest.raises(InvalidRequestError, match='item 2: id: "a" is the id of another document'):
        read_questions([same, {"document": "other", "id": "a"}, PLAIN])


@pytest.mark.parametrize("source", [[], [{"document": "text", "id": "a"}]])
def test_no_questions(source: Any) -> None:
    with pytest.raises(InvalidRequestError, match="there are no questions"):
        read_questions(source)


def test_other_kinds_of_sources(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="a file of JSON lines or a list, got int"):
        read_questions(5)  # type: ignore[arg-type]
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidRequestError, match="not UTF-8 text"):
        read_questions(str(tmp_path / "bytes.jsonl"))
    with pytest.raises(FileNotFoundError):
        read_questions(tmp_path / "nowhere.jsonl")
