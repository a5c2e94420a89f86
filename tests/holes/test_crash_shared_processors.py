"""A caller's own logits processors and stopping criteria may have a state: each of many prompts gets its own.

What `generate_batch`, `generate_many` and `stream_many` answer is what `generate` answers with a fresh one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from kvboost import KVBoost
from kvboost.errors import InvalidRequestError
from tests.fixture_types import MakeEngine
from tests.tiny_models import random_ids

SHARED = random_ids(40, 1)
PROMPTS = [[*SHARED, *random_ids(3 + number, 10 + number)] for number in range(4)]


class Spells(LogitsProcessor):
    """Lets the model say its letters one after the other: its place is its state."""

    def __init__(self, letters: list[int]) -> None:
        self.letters = letters
        self.used = torch.zeros(320)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        step = int(self.used.sum())
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.letters[step % len(self.letters)]] = 0.0
        self.used[step] += 1
        return forced


class StopsAfter(StoppingCriteria):
    """Stops after so many calls."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_kwargs: Any) -> torch.Tensor:  # noqa: ARG002
        self.calls -= 1
        return torch.full((input_ids.shape[0],), self.calls <= 0, device=input_ids.device)


class Never(LogitsProcessor):
    """Forbids what was said before, by its own notes."""

    def __init__(self) -> None:
        self.said: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.said.append(int(input_ids[0, -1]))
        scores[:, self.said] = -torch.inf
        return scores


def answers(engine: KVBoost, how: str, prompts: list[Any], **options: Any) -> list[list[int]]:
    if how == "stream_many":
        found: dict[int, list[int]] = {}
        for index, result in engine.stream_many(prompts, 6, **options):
            found[index] = result.token_ids
        return [found[index] for index in range(len(prompts))]
    return [result.token_ids for result in getattr(engine, how)(prompts, 6, **options)]


@pytest.mark.parametrize("how", ["generate_batch", "generate_many", "stream_many"])
@pytest.mark.parametrize("alone", [False, True], ids=["in a batch", "one by one"])
def test_each_prompt_has_a_processor_of_its_own(make_engine: MakeEngine, how: str, alone: bool) -> None:
    engine = make_engine()
    other: dict[str, Any] = {"num_beams": 2} if alone else {}
    for make in (lambda: Spells([70, 71, 72, 73]), Never):
        expected = [
            engine.generate(prompt, 6, "prefix_cache", logits_processor=[make()], **other).token_ids
            for prompt in PROMPTS
        ]
        mine = make()
        found = answers(engine, how, PROMPTS, logits_processor=LogitsProcessorList([mine]), **other)
        assert found == expected
        assert vars(mine).keys() == vars(make()).keys()
        assert not getattr(mine, "said", [])
        assert not torch.as_tensor(getattr(mine, "used", 0)).any(), "the caller's own is left as it was"


@pytest.mark.parametrize("how", ["generate_batch", "generate_many", "stream_many"])
def test_each_prompt_has_criteria_of_its_own(make_engine: MakeEngine, how: str) -> None:
    engine = make_engine()
    expected = [
        engine.generate(prompt, 6, "prefix_cache", stopping_criteria=[StopsAfter(3)]).token_ids
        for prompt in PROMPTS
    ]
    assert {len(each) for each in expected} == {3}
    criteria = StoppingCriteriaList([StopsAfter(3)])
    assert answers(engine, how, PROMPTS, stopping_criteria=criteria) == expected


def test_a_processor_and_a_criterion_that_share_a_state(make_engine: MakeEngine) -> None:
    """They belong to one prompt together."""
    engine = make_engine()

    class StopsWhenSpelled(StoppingCriteria):
        def __init__(self, spells: Spells) -> None:
            self.spells = spells

        def __call__(self, input_ids: torch.Tensor, scores: Any, **_kwargs: Any) -> torch.Tensor:  # noqa: ARG002
            done = int(self.spells.used.sum()) >= 2
            return torch.full((input_ids.shape[0],), done, device=input_ids.device)

    spells = Spells([70, 71, 72])
    results = engine.generate_batch(
        PROMPTS, 6, logits_processor=[spells], stopping_criteria=[StopsWhenSpelled(spells)]
    )
    assert [result.token_ids for result in results] == [[70, 71]] * len(PROMPTS)


def test_the_state_is_that_of_the_call(make_engine: MakeEngine) -> None:
    """What happens to the caller's processor while answers are still being read changes nothing."""
    engine = make_engine()
    mine = Spells([70, 71, 72])
    stream = engine.stream_many([SHARED, *PROMPTS], 3, logits_processor=[mine])
    mine.used[:] = 1
    found = dict(stream)
    assert {tuple(result.token_ids) for result in found.values()} == {(70, 71, 72)}


def test_model_and_tokenizer_are_not_copied(make_engine: MakeEngine) -> None:
    engine = make_engine()

    def ids_of(each: Any) -> tuple[int, ...]:
        parts = (each.model, each.tokenizer, each.weight, each.other.weight, each.event, *each.inner.values())
        return tuple(id(part) for part in parts)

    class Looks(LogitsProcessor):
        seen: list[tuple[int, ...]] = []  # noqa: RUF012  # of the class, so that copies tell as well

        def __init__(self) -> None:
            self.model = engine.model
            self.tokenizer = engine.tokenizer
            self.weight = engine.model.get_input_embeddings().weight
            self.other = torch.nn.Linear(2, 2)
            self.inner = {"model": engine.model, "tokenizer": engine.tokenizer}
            self.event = threading.Event()

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
            self.seen.append(ids_of(self))
            return scores

    mine = Looks()
    engine.generate_batch(PROMPTS, 2, logits_processor=[mine])
    assert set(Looks.seen) == {ids_of(mine)}


class HoldsAFile(LogitsProcessor):
    """Cannot be copied."""

    def __init__(self) -> None:
        self.lines: Iterator[str] = (line for line in "abc")

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return scores


@pytest.mark.parametrize("how", ["generate_batch", "generate_many", "stream_many"])
def test_what_cannot_be_copied_is_refused_by_name(make_engine: MakeEngine, how: str) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequestError, match=r"logits_processor HoldsAFile .*generate for each prompt"):
        answers(engine, how, PROMPTS, logits_processor=[HoldsAFile()])
    assert len(answers(engine, how, PROMPTS[:1], logits_processor=[HoldsAFile()])) == 1, "nothing is shared"
    assert engine.generate(PROMPTS[0], 2, logits_processor=[HoldsAFile()]).token_ids


@pytest.mark.parametrize("name", ["logits_processor", "stopping_criteria"])
def test_what_is_no_list_is_refused(make_engine: MakeEngine, name: str) -> None:
    engine = make_engine()
    for wrong in (Spells([70]), lambda _ids, scores: scores, [7], "text"):
        with pytest.raises(InvalidRequestError, match=f"{name} must be a list of callables"):
            engine.generate_batch(PROMPTS, 2, **{name: wrong})
        with pytest.raises(InvalidRequestError, match=f"{name} must be a list of callables"):
            engine.generate(PROMPTS[0], 2, **{name: wrong})


def test_nothing_is_copied_before_its_prompt_runs(make_engine: MakeEngine) -> None:
    """Thousands of prompts wait: they hold no thousands of copies."""
    engine = make_engine()

    class Counts(LogitsProcessor):
        alive = 0
        most = 0

        def __deepcopy__(self, _memo: Any) -> Counts:
            Counts.alive += 1
            Counts.most = max(Counts.most, Counts.alive)
            return Counts()

        def __del__(self) -> None:
            Counts.alive -= 1

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
            return scores

    prompts = [[*SHARED, number] for number in range(10, 210)]
    list(engine.stream_many(prompts, 1, logits_processor=[Counts()]))
    assert Counts.most <= 70


def test_one_prompt_uses_the_callers_own(make_engine: MakeEngine) -> None:
    engine = make_engine()
    mine = Spells([70, 71])
    assert engine.generate(PROMPTS[0], 2, logits_processor=[mine]).token_ids == [70, 71]
    assert mine.used.sum() == 2
