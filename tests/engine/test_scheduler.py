"""The running batch: whoever comes and goes when, every request is answered as it would be alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from kvboost import GenerationMode, GenerationResult, KVBoost
from kvboost.batching import batch_memory
from kvboost.batching import scheduler as scheduler_module
from kvboost.batching.pace import Pace
from kvboost.batching.scheduler import Scheduler
from kvboost.choices import Origin
from kvboost.errors import InvalidRequestError
from kvboost.kernels import packed
from kvboost.requests.request import Request
from tests.checked_requests import read_request
from tests.fixture_types import MakeEngine
from tests.forwards import count_fed
from tests.tiny_models import ARCHITECTURES, random_ids


class Heard:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.result: GenerationResult | None = None
        self.error: Exception | None = None

    def token(self, token_id: int) -> None:
        assert self.result is None
        self.tokens.append(token_id)

    def done(self, result: GenerationResult) -> None:
        assert self.result is None
        assert self.error is None
        self.result = result

    def failed(self, error: Exception) -> None:
        assert self.result is None
        self.error = error


def expected(engine: KVBoost, prompt: list[int], new_tokens: int, **options: Any) -> list[int]:
    return engine.generate(prompt, new_tokens, mode=GenerationMode.BASELINE, **options).token_ids


def run(scheduler: Scheduler, arrivals: list[tuple[int, Request]], max_steps: int = 2_000) -> list[Heard]:
    """Let requests arrive at given steps and join when there is room, in order."""
    heard = [Heard() for _ in arrivals]
    waiting = list(zip(arrivals, heard, strict=True))
    for step in range(max_steps):
        while waiting and waiting[0][0][0] <= step:
            request = waiting[0][0][1]
            scheduler.check(request)
            if scheduler.sequences and not scheduler.has_room(request):
                break
            scheduler.join(request, waiting.pop(0)[1])
        if not scheduler.sequences and not waiting:
            break
        scheduler.step()
        check_slots(scheduler)
    assert [each.error for each in heard if each.result is None] == []
    return heard


def check_slots(scheduler: Scheduler) -> None:
    """No slot is lost, none is used twice, and lanes are adjacent."""
    lanes = scheduler.max_sequences * batch_memory.LANE_TOKENS
    used = np.zeros(scheduler.memory.max_slots, dtype=int)
    for start, end in scheduler.radix_tree.pool._ranges:
        used[start:end] += 1
    nodes = {id(node): node for sequence in scheduler.sequences for node in sequence.node.path}
    nodes |= {id(node): node for root in scheduler.radix_tree._roots.values() for node in root.subtree()}
    for node in nodes.values():
        used[node.segment.start : node.segment.start + node.segment.capacity] += 1
    for sequence in scheduler.sequences:
        for segment in sequence.spilled:
            used[segment.start : segment.start + segment.capacity] += 1
    assert used[lanes:].tolist() == [1] * (len(used) - lanes)
    starts = sorted(sequence.lane.start for sequence in scheduler.sequences)
    assert starts == [number * batch_memory.LANE_TOKENS for number in range(len(starts))]


def prompts(count: int, seed: int) -> list[list[int]]:
    """Some begin alike, at several depths, some are alone, one is a single token."""
    draw = random.Random(seed)
    system, document = random_ids(70, seed), random_ids(90, seed + 1)
    made = []
    for index in range(count):
        start = draw.choice([[], system, system + document, system + document[: draw.randint(1, 89)]])
        made.append(start + random_ids(draw.randint(1, 60), 100 * seed + index + 2))
    made[0] = made[0][:1]
    return made


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_everyone_equals_baseline(make_engine: MakeEngine, name: str) -> None:
    engine = make_engine(name)
    if reason := engine.core.parts.why_alone(read_request(engine, [5, 6, 7], 1)):
        pytest.skip(f"{name} runs alone with this transformers: {reason}")
    asked = prompts(10, seed=3)
    draw = random.Random(7)
    lengths = [draw.randint(1, 12) for _ in asked]
    wanted = [expected(engine, prompt, n) for prompt, n in zip(asked, lengths, strict=True)]
    scheduler = engine.core.scheduler(max_sequences=4, max_tokens=2_000)
    at = [draw.randint(0, 15) for _ in asked]
    requests = [read_request(engine, prompt, n) for prompt, n in zip(asked, lengths, strict=True)]
    heard = run(scheduler, sorted(zip(at, requests, strict=True), key=lambda each: each[0]))
    by_request = {id(r): w for r, w in zip(requests, wanted, strict=True)}
    ordered = [r for _, r in sorted(zip(at, requests, strict=True), key=lambda each: each[0])]
    for request, one in zip(ordered, heard, strict=True):
        assert one.result is not None
        assert one.tokens == one.result.token_ids == by_request[id(request)]


@pytest.mark.parametrize("seed", range(6))
def test_many_in_little_room(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Text is evicted from the arena all the time, and sequences wait for each other's text.

    How many prompt tokens a step takes is drawn, down to single ones: measured times would decide it.
    """
    draw = random.Random(seed)
    blocks = [1, 2, 3, 7, 16, 64, 256]
    monkeypatch.setattr(Pace, "budget", lambda *_: draw.choice(blocks))
    engine = make_engine(max_chunks=[None, 6][seed % 2])
    asked = prompts(40, seed=10 + seed)
    lengths = [draw.randint(1, 9) for _ in asked]
    wanted = [expected(engine, prompt, n) for prompt, n in zip(asked, lengths, strict=True)]
    scheduler = engine.core.scheduler(max_sequences=5, max_tokens=320)
    requests = [read_request(engine, prompt, n) for prompt, n in zip(asked, lengths, strict=True)]
    arrivals = list(zip(sorted(draw.choices(range(60), k=40)), requests, strict=True))
    heard = run(scheduler, arrivals)
    assert [one.tokens for one in heard] == wanted
    for one, prompt in zip(heard, asked, strict=True):
        result = one.result
        assert result is not None
        assert result.spans[0].start == 0
        assert result.spans[-1].end == len(prompt)
        assert all(a.end == b.start for a, b in zip(result.spans, result.spans[1:], strict=False))
        assert result.spans[-1].origin is Origin.LIVE
        assert 0 < result.ttft_ms <= result.total_ms


def test_sequences_that_share_a_prefix_are_attended_together(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six sequences in turns behind two texts: per layer one call for each text, and one for all lanes."""
    engine = make_engine()
    texts = [random_ids(60, 1), random_ids(70, 2)]
    asked = [texts[i % 2] + random_ids(5 + i, 10 + i) for i in range(6)]
    wanted = [expected(engine, prompt, 12, min_new_tokens=12) for prompt in asked]
    scheduler = engine.core.scheduler(max_sequences=6, max_tokens=600)
    heard = [Heard() for _ in asked]
    for prompt, one in zip(asked, heard, strict=True):
        scheduler.join(read_request(engine, prompt, 12, min_new_tokens=12), one)
    while not all(sequence.is_decoding and sequence.tail_pulled for sequence in scheduler.sequences):
        scheduler.step()
    calls: list[int] = []
    whole = packed.partial_attention

    def counting(query: torch.Tensor, *rest: Any, **options: Any) -> Any:
        calls.append(len(query))
        return whole(query, *rest, **options)

    monkeypatch.setattr(packed, "partial_attention", counting)
    scheduler.step()
    layers = engine.model.config.num_hidden_layers
    assert sorted(calls) == sorted([1, 1, 6] * layers)
    monkeypatch.undo()
    while scheduler.sequences:
        scheduler.step()
    assert [one.tokens for one in heard] == wanted


def test_a_tenant_without_a_token_does_not_wait_for_long_prompts_of_others(make_engine: MakeEngine) -> None:
    """Every other step is for newcomers alone, however many tokens others have in line."""
    engine = make_engine()
    scheduler = engine.core.scheduler(max_sequences=8, max_tokens=8_000)
    scheduler.join(read_request(engine, random_ids(5, 1), 200), Heard(), tenant="eve")
    scheduler.step()
    for seed in range(3):
        scheduler.join(read_request(engine, random_ids(900, seed + 2), 4), Heard(), tenant="eve")
    scheduler.step()
    wanted = expected(engine, random_ids(40, 9), 3)
    heard = Heard()
    before = scheduler.counts.prefilled_tokens
    scheduler.join(read_request(engine, random_ids(40, 9), 3), heard, tenant="ann")
    scheduler.step()
    assert heard.tokens == wanted[:1]
    assert scheduler.counts.prefilled_tokens - before == 39, "its own, and no other"
    scheduler.step()
    assert scheduler.counts.prefilled_tokens - before > 39, "then the others go on"
    while heard.result is None:
        scheduler.step()
    assert heard.tokens == wanted


def test_newcomers_cannot_keep_others_from_their_turn(make_engine: MakeEngine) -> None:
    """One short request after the other, each a newcomer: the long prompt has every other step."""
    engine = make_engine()
    scheduler = engine.core.scheduler(max_sequences=8, max_tokens=8_000)
    long = Heard()
    wanted = expected(engine, random_ids(1_000, 2), 2)
    scheduler.join(read_request(engine, random_ids(1_000, 2), 2), long, tenant="eve")
    for step in range(60):
        scheduler.join(read_request(engine, random_ids(30, 100 + step), 1), Heard(), tenant="ann")
        scheduler.step()
        if long.result is not None:
            break
    assert long.tokens == wanted


def test_short_prompts_pass_a_long_one(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace, "budget", lambda *_: 32)
    engine = make_engine()
    long, short = random_ids(800, 1), random_ids(40, 2)
    wanted = [expected(engine, prompt, 4) for prompt in (long, short)]
    scheduler = engine.core.scheduler(max_sequences=4, max_tokens=2_000)
    first, second = Heard(), Heard()
    scheduler.join(read_request(engine, long, 4), first)
    scheduler.step()
    scheduler.join(read_request(engine, short, 4), second)
    for _ in range(8):
        scheduler.step()
    assert second.result is not None
    assert first.tokens == []
    assert _seen(scheduler) > 32 + 8 * 16 - 1, "the long one went on all the while"
    while scheduler.sequences:
        scheduler.step()
    assert [first.tokens, second.tokens] == wanted


def _seen(scheduler: Scheduler) -> int:
    """Tokens of the first sequence's prompt that are computed."""
    return scheduler.sequences[0].filled_tokens


def test_long_answers_spill(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers longer than a lane, beside others."""
    monkeypatch.setattr(batch_memory, "LANE_TOKENS", 8)
    engine = make_engine()
    asked = prompts(6, seed=5)
    wanted = [expected(engine, prompt, 30, min_new_tokens=30) for prompt in asked]
    scheduler = engine.core.scheduler(max_sequences=3, max_tokens=900)
    heard = run(
        scheduler, [(3 * i, read_request(engine, p, 30, min_new_tokens=30)) for i, p in enumerate(asked)]
    )
    assert [one.tokens for one in heard] == wanted


def test_options_per_request(make_engine: MakeEngine) -> None:
    """Samplers with seeds, penalties, stop tokens: each sequence has its own."""
    engine = make_engine()
    options: list[dict[str, Any]] = [
        {"do_sample": True, "seed": 1, "temperature": 1.3},
        {"do_sample": True, "seed": 2, "top_p": 0.7},
        {"repetition_penalty": 1.4},
        {},
    ]
    prompt = random_ids(50, 4)
    wanted = [expected(engine, prompt, 12, **each) for each in options]
    heard = run(
        engine.core.scheduler(max_sequences=4, max_tokens=500),
        [(i, read_request(engine, prompt, 12, **each)) for i, each in enumerate(options)],
    )
    assert [one.tokens for one in heard] == wanted


def test_shared_text_is_computed_once(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who needs text that is being computed waits for it: tokens through the model are counted."""
    engine = make_engine()
    seen = count_fed(monkeypatch, engine.model)
    start = random_ids(300, 1)
    asked = [start + random_ids(20, 10 + index) for index in range(4)]
    scheduler = engine.core.scheduler(max_sequences=4, max_tokens=2_000)
    heard = run(scheduler, [(index, read_request(engine, prompt, 3)) for index, prompt in enumerate(asked)])
    monkeypatch.undo()
    live = sum(s.length for one in heard if one.result for s in one.result.spans if s.origin is Origin.LIVE)
    assert sum(seen) == live + 4 * 2  # and each answer's tokens but for the last
    assert live == 300 + 4 * 20
    assert all(one.result is not None and one.result.cached_tokens == 300 for one in heard[1:])


def test_whoever_leaves_is_stored_and_missed_by_nobody(make_engine: MakeEngine) -> None:
    """A request that is cancelled while others wait for the text that it computes."""
    engine = make_engine()
    start = random_ids(600, 2)
    first, second = start + random_ids(5, 3), start + random_ids(5, 4)
    wanted = expected(engine, second, 4)
    scheduler = engine.core.scheduler(max_sequences=4, max_tokens=2_000)
    one, two = Heard(), Heard()
    sequence = scheduler.join(read_request(engine, first, 4), one)
    scheduler.step()
    scheduler.join(read_request(engine, second, 4), two)
    scheduler.leave(sequence)
    scheduler.leave(sequence)
    check_slots(scheduler)
    assert one.result is not None
    assert one.result.finish_reason == "cancelled"
    while scheduler.sequences:
        scheduler.step()
        check_slots(scheduler)
    assert two.tokens == wanted
    assert two.result is not None
    live = sum(span.length for span in two.result.spans if span.origin is Origin.LIVE)
    assert live == len(second) - two.result.cached_tokens > 5  # it had to finish the start
    assert engine.explain(first).cached_tokens >= 600 - 16


def test_reading_only(make_engine: MakeEngine) -> None:
    engine = make_engine()
    scheduler = engine.core.scheduler(max_sequences=2, max_tokens=500)
    prompt = random_ids(80, 6)
    heard = Heard()
    scheduler.join(read_request(engine, prompt, 1), heard, answers=False)
    while scheduler.sequences:
        scheduler.step()
    assert heard.result is not None
    assert heard.tokens == []
    assert engine.explain([*prompt, 5]).cached_tokens == 80
    scheduler.clear()
    check_slots(scheduler)
    assert scheduler.radix_tree.tokens == 0


def test_clearing_while_in_use(make_engine: MakeEngine) -> None:
    engine = make_engine()
    scheduler = engine.core.scheduler(max_sequences=2, max_tokens=500)
    prompt = random_ids(80, 6)
    wanted = expected(engine, prompt, 6)
    one, two = Heard(), Heard()
    scheduler.join(read_request(engine, prompt, 6), one)
    scheduler.step()
    scheduler.clear()
    engine.clear()
    scheduler.join(read_request(engine, prompt, 6), two)
    while scheduler.sequences:
        scheduler.step()
    check_slots(scheduler)
    assert one.tokens == two.tokens == wanted
    assert two.result is not None
    assert two.result.cached_tokens == 0


def test_salts_share_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    scheduler = engine.core.scheduler(max_sequences=4, max_tokens=500)
    prompt = random_ids(80, 6)
    heard = run(
        scheduler, [(0, read_request(engine, prompt, 3, cache_salt=salt)) for salt in ("a", "b", "a")]
    )
    assert [one.result.cached_tokens for one in heard if one.result] == [0, 0, 79]


def test_what_never_fits_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    scheduler = engine.core.scheduler(max_sequences=2, max_tokens=64)
    with pytest.raises(InvalidRequestError, match="need room for 79 tokens, the running batch has 64"):
        scheduler.check(read_request(engine, random_ids(80, 1), 4))


def test_a_failing_processor_fails_one(make_engine: MakeEngine) -> None:
    engine = make_engine()

    def bad(_ids: torch.Tensor, _scores: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")

    scheduler = engine.core.scheduler(max_sequences=2, max_tokens=500)
    good, failing = Heard(), Heard()
    prompt = random_ids(30, 1)
    scheduler.join(read_request(engine, prompt, 4, logits_processor=[bad]), failing)
    scheduler.join(read_request(engine, prompt, 4), good)
    while scheduler.sequences:
        scheduler.step()
    assert str(failing.error) == "no"
    assert good.tokens == expected(engine, prompt, 4)
    check_slots(scheduler)


def test_a_failing_step_fails_those_in_it(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    scheduler = engine.core.scheduler(max_sequences=2, max_tokens=500)
    prompt = random_ids(30, 1)
    wanted = expected(engine, prompt, 4)
    one, two = Heard(), Heard()
    scheduler.join(read_request(engine, prompt, 4), one)
    with monkeypatch.context() as patch:
        patch.setattr(
            scheduler_module.PackedModel,
            "extend",
            lambda *_args: (_ for _ in ()).throw(RuntimeError("out of memory")),
        )
        scheduler.step()
    assert str(one.error) == "out of memory"
    assert not scheduler.sequences
    check_slots(scheduler)
    scheduler.join(read_request(engine, prompt, 4), two)
    while scheduler.sequences:
        scheduler.step()
    assert two.tokens == wanted


def test_a_failed_placement_leaves_nothing_behind(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots that another tenant used, text that could not be copied into them: nobody may read it there."""
    engine = make_engine()
    prompt, later = random_ids(200, 1), random_ids(150, 1) + random_ids(60, 9)
    wanted = [expected(engine, each, 8) for each in (prompt, later)]
    engine.generate(prompt, 8)
    scheduler = engine.core.scheduler(max_sequences=4, max_tokens=600)
    run(scheduler, [(0, read_request(engine, random_ids(500, 5), 4, cache_salt="other"))])
    scheduler.clear()
    with monkeypatch.context() as patch:
        patch.setattr(scheduler._parts.loader._assembler, "place_parts", _out_of_memory)
        with pytest.raises(RuntimeError, match="out of memory"):
            scheduler.join(read_request(engine, prompt, 8), Heard())
    assert scheduler.radix_tree.tokens == 0
    check_slots(scheduler)
    assert [one.tokens for one in run(scheduler, [(0, read_request(engine, prompt, 8))])] == wanted[:1]
    engine.clear()
    assert [one.tokens for one in run(scheduler, [(0, read_request(engine, later, 8))])] == wanted[1:]
    assert engine.generate(later, 8).token_ids == wanted[1], "nothing wrong was stored"


def _out_of_memory(*_: Any, **__: Any) -> None:
    raise RuntimeError("out of memory")


def test_everyone_hears_of_a_device_that_is_gone(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After such an error nothing works any more, not even clearing the arena."""
    engine = make_engine()
    scheduler = engine.core.scheduler(max_sequences=2, max_tokens=300)
    one = Heard()
    scheduler.join(read_request(engine, random_ids(20, 1), 4), one)
    monkeypatch.setattr(scheduler_module.PackedModel, "extend", _out_of_memory)
    monkeypatch.setattr(scheduler.memory.arena, "clear", _out_of_memory)
    with pytest.raises(RuntimeError, match="out of memory"):
        scheduler.step()
    assert str(one.error) == "out of memory"


def test_text_whose_computing_request_left_is_not_called_cached(make_engine: MakeEngine) -> None:
    """B waits for what A computes; the store gets it from elsewhere; A leaves: B computes it, and says so."""
    engine = make_engine()
    shared = random_ids(200, 1)
    scheduler = engine.core.scheduler(max_sequences=2, max_tokens=800)
    first, second = Heard(), Heard()
    going = scheduler.join(read_request(engine, shared + random_ids(10, 2), 4), first)
    engine.warm(shared)
    scheduler.join(read_request(engine, shared + random_ids(12, 3), 4), second)
    scheduler.leave(going)
    while scheduler.sequences:
        scheduler.step()
    result = second.result
    assert result is not None
    assert result.cached_tokens == 0
    assert [(span.start, span.end, span.origin) for span in result.spans] == [(0, 212, Origin.LIVE)]
    assert result.token_ids == expected(engine, shared + random_ids(12, 3), 4)
