"""How tokens are chosen: options, penalties and log-probabilities, alone and in a running batch."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from kvboost import KVBoost
from kvboost.models import GenerationResult
from kvboost.requests.request import Arguments
from kvboost.server.tokens import LogprobRecorder, RepeatPenalties, TokenScore, sampling_arguments
from kvboost.server.worker import Worker
from tests.fixture_types import MakeEngine
from tests.tiny_models import random_ids

PROMPT = random_ids(40, 3)


@dataclass
class Fields:
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None


def answered(
    engine: KVBoost, batching: bool, fields: Fields, top: int | None = None, tokens: int = 20
) -> tuple[GenerationResult, list[TokenScore]]:
    """The answer to PROMPT, and the scores of its tokens as the server would take them."""
    recorder = None if top is None else LogprobRecorder(top)
    arguments = replace(sampling_arguments(fields, 0, len(PROMPT), recorder), max_new_tokens=tokens)
    worker = Worker(engine, batching=batching)

    async def run() -> tuple[GenerationResult, list[TokenScore]]:
        ticket = worker.submit(engine.core.read(PROMPT, arguments))
        scores = [recorder.take(token) async for token in ticket if recorder is not None]
        return ticket.result, scores

    try:
        return asyncio.run(run())
    finally:
        worker.close(5)


def raw_logprobs(engine: KVBoost, answer: list[int]) -> torch.Tensor:
    """The model's own distributions before each token of the answer, `[tokens, vocab]`."""
    ids = torch.tensor([PROMPT + answer])
    with torch.no_grad():
        logits = engine.model(input_ids=ids).logits[0, len(PROMPT) - 1 : -1]
    return logits.float().log_softmax(-1)


def test_greedy_needs_nothing() -> None:
    assert sampling_arguments(Fields(temperature=0, seed=3), 0, 5, None) == Arguments(
        options={"num_beams": 1}
    )
    assert not sampling_arguments(Fields(temperature=1e-6), 0, 5, None).do_sample


def test_sampling_is_from_everything_unless_asked_otherwise() -> None:
    arguments = sampling_arguments(Fields(), 0, 5, None)
    wanted = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "typical_p": 1.0}
    assert wanted.items() <= arguments.options.items()
    assert (arguments.do_sample, arguments.temperature) == (True, 1.0)
    assert arguments.seed is not None
    assert 0 <= arguments.seed < 2**63
    assert sampling_arguments(Fields(), 0, 5, None).seed != arguments.seed
    assert sampling_arguments(Fields(top_p=0), 0, 5, None).options["top_p"] > 0


@pytest.mark.parametrize(
    ("seed", "index", "drawn"), [(7, 0, 7), (7, 3, 10), (2**63 - 1, 1, 0), (-1, 0, 2**63 - 1)]
)
def test_choices_draw_from_seeds_of_their_own(seed: int, index: int, drawn: int) -> None:
    assert sampling_arguments(Fields(seed=seed), index, 5, None).seed == drawn


@pytest.mark.parametrize("batching", [True, False])
def test_what_the_model_says_about_sampling_does_not_count(make_engine: MakeEngine, batching: bool) -> None:
    engine = make_engine()
    fields = Fields(temperature=1.5, seed=5)
    plain, _ = answered(engine, batching, fields)
    config = engine.model.generation_config
    config.top_k, config.top_p, config.temperature, config.min_p, config.typical_p = 1, 0.1, 0.1, 0.9, 0.2
    again, _ = answered(engine, batching, fields)
    assert again.token_ids == plain.token_ids
    assert len(set(plain.token_ids)) > 5


def test_alone_and_in_a_batch_the_same_is_drawn(make_engine: MakeEngine) -> None:
    engine = make_engine()
    fields = Fields(temperature=0.9, top_p=0.8, seed=11, frequency_penalty=0.7, presence_penalty=-0.3)
    alone, scores = answered(engine, False, fields, top=3)
    beside, others = answered(engine, True, fields, top=3)
    assert alone.token_ids == beside.token_ids
    for one, other in zip(scores, others, strict=True):
        assert one.token == other.token
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.parametrize("batching", [True, False])
def test_logprobs_are_the_models_own_whatever_the_penalties(make_engine: MakeEngine, batching: bool) -> None:
    engine = make_engine()
    fields = Fields(temperature=0.5, top_p=0.5, seed=1, frequency_penalty=2, presence_penalty=2)
    result, scores = answered(engine, batching, fields, top=4)
    own = raw_logprobs(engine, result.token_ids)
    assert [score.token for score in scores] == result.token_ids
    for score, distribution in zip(scores, own, strict=True):
        assert score.logprob == pytest.approx(float(distribution[score.token]), abs=1e-4)
        best = distribution.topk(4)
        assert [logprob for _, logprob in score.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_logprobs_that_json_cannot_hold() -> None:
    recorder = LogprobRecorder(2)
    scores = torch.full((1, 5), float("-inf"))
    scores[0, 3] = 0.0
    assert recorder(torch.tensor([[1]]), scores) is scores
    assert recorder.take(1) == TokenScore(1, -9999.0, ((3, 0.0), (recorder_second(scores), -9999.0)))


def recorder_second(scores: torch.Tensor) -> int:
    return int(scores[0].topk(2).indices[1])


@pytest.mark.parametrize("batching", [True, False])
@pytest.mark.parametrize(("frequency", "presence"), [(1.5, 0.0), (0.0, 2.0), (-1.0, 0.5)])
def test_penalties_count_generated_tokens_only(
    make_engine: MakeEngine, batching: bool, frequency: float, presence: float
) -> None:
    engine = make_engine()
    result, _ = answered(engine, batching, Fields(0, frequency_penalty=frequency, presence_penalty=presence))
    counts: Counter[int] = Counter()
    for token, logprobs in zip(result.token_ids, raw_logprobs(engine, result.token_ids), strict=True):
        for seen, times in counts.items():
            logprobs[seen] -= times * frequency + presence
        assert token == int(logprobs.argmax())
        counts[token] += 1


def test_penalties_look_at_each_token_once() -> None:
    penalties: Any = RepeatPenalties(3, 1.0, 0.5)
    ids = torch.tensor([[4, 4, 4]])
    scores = torch.zeros(1, 6)
    assert penalties(ids, scores).tolist() == [[0.0] * 6]
    assert penalties(torch.tensor([[4, 4, 4, 2]]), scores)[0, 2] == -1.5
    assert penalties(torch.tensor([[4, 4, 4, 2, 2]]), scores).tolist() == [[0, 0, -2.5, 0, 0, 0]]
    assert scores.tolist() == [[0.0] * 6], "what is given stays as it is"
