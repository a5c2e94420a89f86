"""Prompts over documents: the same every time, disjoint texts, facts in their places, ids as warmed."""

from __future__ import annotations

import itertools
from random import Random
from typing import Any

import pytest

from kvboost.errors import InvalidRequestError
from kvboost.proof.documents import (
    ALONE,
    BEHIND,
    TOGETHER,
    Case,
    Document,
    Group,
    PromptWriter,
    Shelf,
    groups_of,
    make_cases,
    needle_cases,
)
from kvboost.proof.facts import Fact

GROUPS = groups_of((2, 3), 1_200)  # bytes are tokens here, so texts are short


@pytest.fixture(scope="module")
def cases(tokenizer: Any) -> list[Case]:
    return list(make_cases(tokenizer, GROUPS, 12, seed=7))


def words(text: str) -> list[str]:
    return text.split()


def stretches(text: str, length: int = 12) -> set[tuple[str, ...]]:
    """All runs of `length` words."""
    found = words(text)
    return {tuple(found[start : start + length]) for start in range(len(found) - length + 1)}


def test_the_same_seed_gives_the_same_cases(tokenizer: Any, cases: list[Case]) -> None:
    again = list(make_cases(tokenizer, GROUPS, 12, seed=7))
    other = list(make_cases(tokenizer, GROUPS, 12, seed=8))

    def ids(some: list[Case]) -> list[Any]:
        return [(case.prompt.token_ids.tolist(), case.read_before) for case in some]

    assert ids(again) == ids(cases)
    assert all(one != two for one, two in zip(ids(other), ids(cases), strict=True))


def test_groups_take_turns(cases: list[Case]) -> None:
    assert [group.name for group in GROUPS] == ["alone-2", "alone-3", "behind-2", "behind-3"]
    assert [case.group for case in cases] == [group.name for group in GROUPS] * 3
    assert {len(case.prompt.documents) for case in cases if case.group.endswith("3")} == {3}


def test_documents_of_a_prompt_have_nothing_in_common(cases: list[Case]) -> None:
    for case in cases:
        for one, two in itertools.combinations(case.prompt.documents, 2):
            assert not stretches(one.text) & stretches(two.text)


def test_other_text_is_really_other_text(tokenizer: Any, cases: list[Case]) -> None:
    for case in cases:
        prompt = tokenizer.decode(case.prompt.token_ids)
        for ids in case.read_before:
            (document,) = [d for d in case.prompt.documents if tuple(ids[-len(d.token_ids) :]) == d.token_ids]
            before = tokenizer.decode(ids[: -len(document.token_ids)])
            assert bool(before) == case.group.startswith(BEHIND)
            assert not stretches(before) & stretches(prompt)
            if before:
                assert len(ids) - len(document.token_ids) >= 256


def test_what_was_read_stands_in_the_prompt(cases: list[Case]) -> None:
    for case in cases:
        prompt = case.prompt.token_ids.tolist()
        for document, (start, end) in zip(case.prompt.documents, case.prompt.spans, strict=True):
            assert tuple(prompt[start:end]) == document.token_ids
        assert len(case.read_before) == len(case.prompt.documents)
        share = sum(end - start for start, end in case.prompt.spans) / len(prompt)
        assert share > 0.6


def test_every_document_holds_its_fact_and_no_other(cases: list[Case]) -> None:
    for case in cases:
        facts = [document.fact for document in case.prompt.documents]
        assert len({fact.name for fact in facts}) == len({fact.sentence for fact in facts}) == len(facts)
        for document, fact in itertools.product(case.prompt.documents, facts):
            assert document.text.count(fact.sentence) == (document.fact == fact)
        assert case.prompt.asked in facts
        assert case.prompt.content.endswith(f"Question: {case.prompt.asked.question}")


def test_facts_stand_at_different_places(cases: list[Case]) -> None:
    places = [
        document.text.index(document.fact.sentence) / len(document.text)
        for case in cases
        for document in case.prompt.documents
    ]
    assert min(places) < 0.4
    assert max(places) > 0.7


def test_pieces_have_the_length_that_was_asked_for(tokenizer: Any) -> None:
    shelf = Shelf(tokenizer, 300, 500, seed=0)
    lengths = [len(tokenizer(piece)["input_ids"]) for piece in shelf.take(60)]
    assert min(lengths) >= 290  # space at the ends is stripped
    assert max(lengths) <= 500
    assert max(lengths) - min(lengths) > 100


def test_an_empty_shelf_is_filled_again_with_other_cuts(tokenizer: Any) -> None:
    shelf = Shelf(tokenizer, 5_000, 6_000, seed=0)
    first = shelf.take(20)
    later = [piece for _ in range(8) for piece in shelf.take(20)]
    assert len(later) == 160
    assert set(first) - set(later)


def test_more_text_than_there_is_is_an_error(tokenizer: Any) -> None:
    with pytest.raises(InvalidRequestError, match="shorter or fewer documents"):
        Shelf(tokenizer, 5_000, 6_000, seed=0).take(10_000)
    with pytest.raises(InvalidRequestError, match="1 token"):
        Shelf(tokenizer, 0, 10, seed=0)


def test_the_prompt_is_the_chat_template_of_its_content(tokenizer: Any, cases: list[Case]) -> None:
    """Encoding piece by piece changes nothing where the tokenizer splits between them anyway."""
    for case in cases:
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": case.prompt.content}], tokenize=False, add_generation_prompt=True
        )
        assert tokenizer(rendered, add_special_tokens=False)["input_ids"] == case.prompt.token_ids.tolist()


class PlainTokenizer:
    """Bytes behind a start token, and no chat template."""

    chat_template = None

    def __call__(self, text: str, *, add_special_tokens: bool = True, **_options: Any) -> dict[str, Any]:
        return {"input_ids": [1] * add_special_tokens + [10 + byte for byte in text.encode()]}


def test_a_tokenizer_without_a_template() -> None:
    writer = PromptWriter(PlainTokenizer())
    (document,) = writer.documents(["Some text. More of it."], Random(0))
    prompt = writer.prompt([document], document.fact)
    assert prompt.token_ids.tolist().count(1) == 1
    assert prompt.token_ids[0] == 1
    text = bytes(token - 10 for token in prompt.token_ids[1:].tolist()).decode()
    assert text == f"{prompt.content}\nAnswer:"
    assert writer.read_by_itself(document) == [1, *document.token_ids]
    assert writer.read_by_itself(document, behind=["ab"]) == [1, 107, 108, 20, 20, *document.token_ids]


def test_needles_are_read_alone_and_together(tokenizer: Any) -> None:
    seen = list(itertools.islice(needle_cases(tokenizer, (2, 3), 600, seed=1), 6))
    again = list(itertools.islice(needle_cases(tokenizer, (2, 3), 600, seed=1), 6))
    for (alone, together), (same, _) in zip(seen, again, strict=True):
        assert (alone.way, together.way) == (ALONE, TOGETHER)
        assert alone.prompt is together.prompt
        assert alone.read_before == together.read_before
        assert alone.prompt.token_ids.tolist() == same.prompt.token_ids.tolist()
        prompt = tokenizer.decode(alone.prompt.token_ids)
        assert prompt.count(alone.prompt.asked.sentence) == 1
        documents = {tuple(document.token_ids) for document in alone.prompt.documents}
        assert documents == {tuple(ids) for ids in alone.read_before}
    assert {len(alone.prompt.documents) for alone, _ in seen} == {2, 3}


def test_groups_and_documents_are_plain_data() -> None:
    assert Group(ALONE, 4, (10, 20)).name == "alone-4"
    assert groups_of((4, 4), 100) == groups_of((4,), 100)
    assert Document("a", Fact("b", "c", 1), (2,)).fact.question == "What is the b of the c?"
