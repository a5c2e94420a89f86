"""Made-up facts: numbers, names and dates, and when an answer gives them."""

from __future__ import annotations

from random import Random

import pytest

from kvboost.errors import InvalidRequestError
from kvboost.proof.facts import DateFact, Fact, Needle, PersonFact, draw_facts, draw_needles

NUMBER = Fact("access code", "Heron archive", 4812)
PERSON = PersonFact("keeper", "Heron archive", "Marta Lindqvist")
DATE = DateFact("opened", "Heron archive", 3, "March", 1987)


@pytest.mark.parametrize(
    ("fact", "answer", "found"),
    [
        (NUMBER, "It is 4812.", True),
        (NUMBER, "4,812", True),
        (NUMBER, "code: 4 812!", True),
        (NUMBER, "It is 48123.", False),
        (NUMBER, "14812", False),
        (NUMBER, "It is 481", False),
        (NUMBER, "", False),
        (PERSON, "The keeper is Marta Lindqvist.", True),
        (PERSON, "marta lindqvist", True),
        (PERSON, "Marta", False),
        (PERSON, "Marta Keller, not Lindqvist", False),
        (DATE, "It was opened on 3 March 1987.", True),
        (DATE, "on March 3, 1987", True),
        (DATE, "the 3rd of March 1987", True),
        (DATE, "13 March 1987", False),
        (DATE, "3 March 1988", False),
        (DATE, "March 1987", False),
    ],
)
def test_an_answer_gives_a_fact_or_not(fact: Needle, answer: str, found: bool) -> None:
    assert fact.is_in(answer) is found


@pytest.mark.parametrize("fact", [NUMBER, PERSON, DATE])
def test_a_sentence_answers_its_question(fact: Needle) -> None:
    assert fact.is_in(fact.sentence)
    assert not fact.is_in(fact.question)
    assert fact.name in fact.question


def test_needles_are_of_all_kinds_and_about_different_places() -> None:
    needles = draw_needles(60, Random(0))
    assert {type(needle) for needle in needles} == {Fact, PersonFact, DateFact}
    assert len({needle.name for needle in needles}) == 60
    assert draw_needles(60, Random(0)) == needles
    for needle in needles:
        assert [other for other in needles if other.is_in(needle.sentence)] == [needle]


@pytest.mark.parametrize("draw", [draw_facts, draw_needles])
def test_more_facts_than_there_are_is_an_error(draw: object) -> None:
    with pytest.raises(InvalidRequestError, match="made-up facts"):
        draw(10_000, Random(0))  # type: ignore[operator]
