"""The running batch: whoever comes and goes when, every request is answered as it would be alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvboost import GenerationMode, GenerationResult, KVBoost
from kvboost.batching import batch_memory, prefill
from kvboost.batching import scheduler as scheduler_module
from kvboost.batching.pace import Pace
from kvboost.batching.radix_tree import Node, RadixTree
from kvboost.batching.scheduler import Scheduler
from kvboost.batching.slot_pool import SlotPool
from kvboost.choices import Origin
from kvboost.errors import InvalidRequestError
from kvboost.kernels import packed
from kvboost.requests.request import Request
from tests.checked_requests import read_request
from tests.forwards import count_fed
from tests.tiny_models import ARCHITECTURES, random_ids

MakeEngine = Callable[..., KVBoost]


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
    used = np.zeros(scheduler._memory.arena.capacity, dtype=int)
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


def test_the_shortest_of_every_tenant_comes_first() -> None:
    needs = [
        prefill.Need(500, 500, "eve"),
        *(prefill.Need(5, 5, "eve") for _ in range(8)),
        prefill.Need(20, 20, "ann"),
    ]
    assert prefill.shares(64, needs) == [32, 5, 5, 2, 0, 0, 0, 0, 0, 20]


@pytest.mark.parametrize(
    ("budget", "needs", "shares"),
    [
        (64, [], []),
        (64, [(30, 30)], [30]),
        (64, [(500, 500)], [64]),
        (64, [(500, 500), (10, 10)], [54, 10]),
        (64, [(500, 500), (60, 200), (20, 20)], [32, 12, 20]),
        (64, [(10, 500), (60, 60), (60, 90)], [10, 54, 0]),
        (1, [(5, 5), (3, 3)], [1, 0]),
        (0, [(5, 5)], [0]),
    ],
)
def test_shares_of_a_step(budget: int, needs: list[tuple[int, int]], shares: list[int]) -> None:
    """Half for who came first, and then the shortest; nothing is left while somebody needs it."""
    assert prefill.shares(budget, [prefill.Need(*each) for each in needs]) == shares


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
            scheduler_module, "extend", lambda *_args: (_ for _ in ()).throw(RuntimeError("out of memory"))
        )
        scheduler.step()
    assert str(one.error) == "out of memory"
    assert not scheduler.sequences
    check_slots(scheduler)
    scheduler.join(read_request(engine, prompt, 4), two)
    while scheduler.sequences:
        scheduler.step()
    assert two.tokens == wanted


def test_long_prompts_go_in_blocks() -> None:
    """With tokens to come on time, a step takes as many prompt tokens as it can bear."""
    pace = Pace(on_gpu=False)
    assert pace.budget(0, 1) == 256  # nothing is known yet
    assert pace.budget(3, 1) + 3 == 256
    pace.record(0.1, 3, 0)
    pace.record(1.0, 0, 250)
    assert pace.budget(0, 1) == 256
    assert pace.budget(3, 1) + 3 == 128  # (6 - 1) x 0.1 s at 4 ms per token, and few sizes of steps
    assert pace.budget(3, 5) + 3 == 192  # more wait for their first token
    assert pace.budget(4, 30) + 4 == 256
    for _ in range(31):
        pace.record(1.1, 3, 10)  # attention grows with the text
    assert pace.budget(3, 1) == 16
    pace.record(1.1, 3, 10)
    assert pace.budget(3, 1) == 0  # a step by itself is timed again
    pace.record(0.5, 3, 0)
    assert pace.budget(3, 1) > 16


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
        patch.setattr(scheduler._context.loader._assembler, "place_parts", _out_of_memory)
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
    monkeypatch.setattr(scheduler_module, "extend", _out_of_memory)
    monkeypatch.setattr(scheduler._memory.arena, "clear", _out_of_memory)
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


def test_prompts_go_on_however_many_decode() -> None:
    """Rounding leaves some prompt tokens to every step, and now and then a step is timed without any."""
    pace = Pace(on_gpu=False)
    pace.record(0.1, 1, 0)
    pace.record(1.0, 0, 40)
    for decoding in range(1, 200):
        assert pace.budget(decoding, 1) >= 16
    slow = Pace(on_gpu=False)
    slow.record(0.01, 1, 0)  # one short sequence
    slow.record(0.5, 0, 250)
    blocks = []
    for _ in range(200):
        block = slow.budget(31, 1)
        blocks.append(block)
        slow.record(0.2 + 0.002 * block, 31, block)  # in truth 31 long sequences take 200 ms
    assert blocks.count(0) >= 4
    assert max(blocks[150:]) == 225, "6 x 0.2 s allow 500 tokens; 256 is the most"


class TestSlots:
    def test_pool(self) -> None:
        pool = SlotPool(10, 30)
        assert pool.take(5) == [(10, 15)]
        assert pool.take(5) == [(15, 20)]
        pool.give(10, 15)
        assert pool.take(12) == [(20, 30), (10, 12)]
        assert pool.free == 3
        with pytest.raises(ValueError, match="4 slots are wanted, 3 are free"):
            pool.take(4)
        for start, end in [(15, 20), (10, 12), (20, 30)]:
            pool.give(start, end)
        assert pool._ranges == [(10, 30)]

    def test_the_oldest_goes_first(self) -> None:
        radix_tree = RadixTree(SlotPool(0, 100))
        for seed in (1, 2, 3):
            node, there = radix_tree.enter("a", np.array(random_ids(30, seed)))
            assert there == 0
            node.segment.length = 30
            radix_tree.leave(node)
        assert radix_tree.find("a", np.array(random_ids(30, 1))).at == 30
        node, _ = radix_tree.enter("a", np.array(random_ids(30, 1)))  # used again
        radix_tree.leave(node)
        radix_tree.take(30)
        found = [radix_tree.find("a", np.array(random_ids(30, seed))).at for seed in (1, 2, 3)]
        assert found == [30, 0, 30]

    def test_namespaces_without_text_are_forgotten(self) -> None:
        """Clients choose salts: a thousand of them leave nothing behind but the text that fits."""
        radix_tree = RadixTree(SlotPool(0, 400))
        for number in range(1_000):
            node, _ = radix_tree.enter(f"salt {number}", np.arange(40))
            for each in node.path:
                each.segment.length = each.segment.capacity
            radix_tree.leave(node)
            assert len(radix_tree._roots) <= 10
        assert radix_tree.tokens == 400
        empty, at = radix_tree.enter("nothing", np.arange(0))
        assert (len(empty.tokens), at) == (0, 0)
        radix_tree.leave(empty)
        assert "nothing" not in radix_tree._roots
        radix_tree.clear()
        assert radix_tree.pool._ranges == [(0, 400)]

    def test_the_last_text_of_a_namespace_makes_room_for_its_next(self) -> None:
        radix_tree = RadixTree(SlotPool(0, 50))
        for seed in (0, 100, 200):
            node, _ = radix_tree.enter("a", np.arange(40) + seed)
            for each in node.path:
                each.segment.length = each.segment.capacity
            radix_tree.leave(node)
            assert radix_tree.find("a", np.arange(40) + seed).at == 40

    def test_new_text_lies_in_few_pieces(self) -> None:
        """Prompts of all lengths come and go for long, and paths do not fall to pieces."""
        draw = random.Random(1)
        make = np.random.default_rng(1)
        radix_tree = RadixTree(SlotPool(0, 8_000))
        texts = [make.integers(0, 9_999, draw.randint(100, 400)) for _ in range(10)]
        living: list[Node] = []
        pieces = []
        for number in range(1_500):
            tokens = make.integers(0, 9_999, draw.randint(5, 400))
            if draw.random() < 0.6:
                tokens = np.concatenate([draw.choice(texts), tokens[:100]])
            while len(living) >= 8 or (living and _lacks_room(radix_tree, tokens)):
                radix_tree.leave(living.pop(draw.randrange(len(living))))
            node, _ = radix_tree.enter("a", tokens)
            for each in node.path:
                each.segment.length = each.segment.capacity
            living.append(node)
            if number > 1_000:
                pieces.append(len(node.path))
        assert np.mean(pieces) < 6, "26 without"
        assert max(pieces) <= 12


def _lacks_room(radix_tree: RadixTree, tokens: np.ndarray) -> bool:
    needed, there = radix_tree.room_for("a", tokens, 0)
    return needed > there
