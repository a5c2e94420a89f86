"""The engine's own batch, in which single requests run: here on a CPU, without captured steps."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from kvboost import KVBoost
from kvboost.batching.scheduler import Scheduler
from kvboost.run.packed_step import PackedModel
from tests.fixture_types import MakeEngine
from tests.tiny_models import ARCHITECTURES, random_ids


@pytest.fixture
def engine(make_engine: MakeEngine) -> KVBoost:
    return with_resident(make_engine("llama"))


def with_resident(engine: KVBoost) -> KVBoost:
    engine.core.resident.exists = True
    return engine


def forwards(engine: KVBoost) -> int:
    return int(engine.core.resident.step_stats().get("forwards", 0))


OPTIONS: list[dict[str, Any]] = [
    {},
    {"do_sample": True, "seed": 5, "temperature": 0.7},
    {"do_sample": True, "seed": 6, "top_p": 0.8, "top_k": 20},
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2},
    {"min_new_tokens": 9},
    {"suppress_tokens": [3, 4, 5]},
    {"stop_strings": ["a", "e"]},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equals_baseline(options: dict[str, Any], engine: KVBoost) -> None:
    shared = random_ids(90, seed=1)
    for number, cut in enumerate((5, 60, 90)):
        prompt = [*shared[:cut], *random_ids(11, seed=2 + number)]
        want = engine.generate(prompt, 12, mode="baseline", **options)
        before = forwards(engine)
        found = engine.generate(prompt, 12, mode="prefix_cache", **options)
        assert (found.token_ids, found.finish_reason) == (want.token_ids, want.finish_reason)
        assert forwards(engine) > before
        again = engine.generate(prompt, 12, mode="prefix_cache", **options)
        assert again.token_ids == want.token_ids
        assert again.cached_tokens == len(prompt) - 1


@pytest.mark.parametrize("least", [1, 3, 12])
def test_ends_that_come_too_early_are_not_taken(least: int, engine: KVBoost) -> None:
    prompt = random_ids(60, seed=4)
    plain = engine.generate(prompt, 12, mode="baseline").token_ids
    for ends in (plain[:1], [plain[0], plain[2], 10_000_000], [-1, *plain], [-1]):
        options: dict[str, Any] = {"eos_token_id": ends, "min_new_tokens": least}
        want = engine.generate(prompt, 12, mode="baseline", **options).token_ids
        assert (want == plain) is (ends == [-1])
        before = forwards(engine)
        assert engine.generate(prompt, 12, mode="prefix_cache", **options).token_ids == want
        assert forwards(engine) > before
        other = engine.generate(prompt[:-1], 12, mode="baseline", **options).token_ids
        both = engine.generate_batch([prompt, prompt[:-1]], 12, mode="prefix_cache", **options)
        assert [each.token_ids for each in both] == [want, other]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture(architecture: str, make_engine: MakeEngine) -> None:
    engine = with_resident(make_engine(architecture))
    prompt = random_ids(70, seed=1)
    for tail in (3, 4):
        longer = [*prompt, *random_ids(tail, seed=tail)]
        want = engine.generate(longer, 8, mode="baseline").token_ids
        assert engine.generate(longer, 8, mode="prefix_cache").token_ids == want
    assert forwards(engine) or engine.why_not_packed


def test_what_needs_generate_runs_alone(engine: KVBoost) -> None:
    prompt = random_ids(40, seed=1)
    want = engine.generate(prompt, 6, mode="baseline", num_beams=2).token_ids
    assert engine.generate(prompt, 6, mode="prefix_cache", num_beams=2).token_ids == want
    assert not forwards(engine)


class Streamer:
    def __init__(self) -> None:
        self.heard: list[list[int]] = []
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        self.heard.append(value.flatten().tolist())

    def end(self) -> None:
        self.ends += 1


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}], ids=str)
def test_a_streamer_hears_what_generate_tells_it(options: dict[str, Any], engine: KVBoost) -> None:
    prompt = random_ids(40, seed=8)
    heard = {}
    for mode in ("baseline", "prefix_cache"):
        streamer = Streamer()
        engine.generate(prompt, 7, mode=mode, streamer=streamer, **options)
        assert streamer.ends == 1
        heard[mode] = streamer.heard
    assert heard["baseline"] == heard["prefix_cache"]
    assert forwards(engine)


def test_a_stream_that_is_closed_ends(engine: KVBoost) -> None:
    stream = engine.stream(random_ids(40, seed=1), 300, mode="prefix_cache")
    stream.close()
    assert stream.result.finish_reason == "cancelled"
    assert 0 < stream.result.generated_tokens < 300
    assert forwards(engine)
    assert engine.generate(random_ids(40, seed=1), 5, mode="prefix_cache").cached_tokens == 39


def test_a_failing_streamer_fails_its_request_alone(engine: KVBoost) -> None:
    class Failing(Streamer):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.heard) == 4:
                raise ValueError("nobody listens")

    prompt = random_ids(40, seed=8)
    want = engine.generate(prompt, 7, mode="baseline").token_ids
    with pytest.raises(ValueError, match="nobody listens"):
        engine.generate(prompt, 7, mode="prefix_cache", streamer=Failing())
    assert engine.generate(prompt, 7, mode="prefix_cache").token_ids == want


def test_a_step_that_is_broken_off_leaves_nothing(engine: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of a forward: segments count tokens whose KV was never computed."""
    prompt = random_ids(60, seed=8)
    want = engine.generate(prompt, 7, mode="baseline").token_ids
    eager = PackedModel._eager

    def interrupted(*_args: Any) -> torch.Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(PackedModel, "_eager", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompt, 7, mode="prefix_cache")
    monkeypatch.setattr(PackedModel, "_eager", eager)
    result = engine.generate(prompt, 7, mode="prefix_cache")
    assert (result.token_ids, result.cached_tokens) == (want, 0)


def test_cleared_text_is_forgotten(engine: KVBoost) -> None:
    prompt = random_ids(60, seed=8)
    engine.generate(prompt, 4, mode="prefix_cache")
    engine.clear()
    assert engine.generate(prompt, 4, mode="prefix_cache").cached_tokens == 0
    engine.close()
    assert engine.core.resident.nbytes == 0


def test_text_is_cleared_while_another_has_the_batch(engine: KVBoost) -> None:
    prompts = [random_ids(60, seed=8), random_ids(50, seed=9)]
    taken = engine.stream_many(prompts, 4, mode="prefix_cache")
    next(taken)
    engine.clear()
    list(taken)
    assert engine.generate(prompts[0], 4, mode="prefix_cache").token_ids


def test_who_finds_it_taken_runs_alone(engine: KVBoost) -> None:
    prompts = [[*random_ids(60, seed=8), *random_ids(5, seed=number)] for number in range(3)]
    wants = [engine.generate(prompt, 6, mode="baseline").token_ids for prompt in prompts]
    taken = engine.stream_many(prompts, 6, mode="prefix_cache")
    index, first = next(taken)
    assert first.token_ids == wants[index]
    before = forwards(engine)
    assert engine.generate(prompts[1], 6, mode="prefix_cache").token_ids == wants[1]
    assert forwards(engine) == before
    rest = dict(taken)
    assert all(rest[number].token_ids == wants[number] for number in rest)
    assert engine.generate(prompts[1], 6, mode="prefix_cache").token_ids == wants[1]
    assert forwards(engine) > before


def test_threads(engine: KVBoost) -> None:
    prompts = [[*random_ids(40, seed=8), *random_ids(9, seed=number)] for number in range(8)]
    wants = [engine.generate(prompt, 6, mode="baseline").token_ids for prompt in prompts]
    wrong: list[Any] = []

    def ask(number: int) -> None:
        for _ in range(6):
            found = engine.generate(prompts[number], 6, mode="prefix_cache").token_ids
            if found != wants[number]:
                wrong.append((number, found))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_model_that_changes_in_the_middle(engine: KVBoost) -> None:
    """The answer goes on with the model as it is then, and nothing of it is served afterwards."""
    prompt = random_ids(50, seed=3)

    class Changing(Streamer):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.heard) == 4:
                with torch.no_grad():
                    engine.model.model.layers[0].mlp.down_proj.weight.mul_(-2.0)

    found = engine.generate(prompt, 9, mode="prefix_cache", streamer=Changing())
    assert len(found.token_ids) == 9
    want = engine.generate(prompt, 9, mode="baseline").token_ids
    assert engine.generate(prompt, 9, mode="prefix_cache").token_ids == want


def test_prompts_that_share_nothing_run_together(engine: KVBoost) -> None:
    prompts = [random_ids(30, seed=number) for number in range(5)]
    wants = [engine.generate(prompt, 6, mode="baseline").token_ids for prompt in prompts]
    found = engine.generate_many(prompts, 6, mode="prefix_cache")
    assert [result.token_ids for result in found] == wants
    assert engine.cache_stats()["batches"]["sequences"] == 5


def test_long_prompts_and_scores_that_do_not_fit(engine: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.core.resident, "_most_slots", lambda _layout: 2_048)
    engine.generate(random_ids(20, seed=1), 2, mode="prefix_cache")
    scheduler = engine.core.resident._scheduler
    assert isinstance(scheduler, Scheduler)
    assert scheduler.max_sequences == 2
    long = [random_ids(1_700, seed=1, low=3)[:1_700], random_ids(30, seed=2)]
    if engine.max_positions is not None and engine.max_positions < 1_800:
        long[0] = long[0][: engine.max_positions - 10]
    wants = [engine.generate(prompt, 5, mode="baseline").token_ids for prompt in long]
    assert [each.token_ids for each in engine.generate_batch(long, 5, mode="prefix_cache")] == wants
    scored = engine.score([long[1]], [random_ids(300, seed=5)])
    alone = engine.score([long[1]], [random_ids(300, seed=5)], mode="baseline")
    assert scored[0].log_likelihood == pytest.approx(alone[0].log_likelihood, rel=1e-4)


def change(engine: KVBoost, factor: float) -> None:
    with torch.no_grad():
        engine.model.model.layers[0].mlp.down_proj.weight.mul_(factor)


@pytest.mark.parametrize("new_tokens", [1, 3])
def test_a_model_that_changes_behind_its_reading(new_tokens: int, engine: KVBoost) -> None:
    """The text that was computed then is of nobody knows which model: it must not be found again."""
    prompt = random_ids(60, seed=3)

    class Changing(Streamer):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.heard) == 1:  # the prompt: the model was read, its forward is still to come
                change(engine, -2.0)

    engine.generate(prompt, new_tokens, mode="prefix_cache", streamer=Changing())
    change(engine, -0.5)
    longer = [*prompt, *random_ids(6, seed=4)]
    want = engine.generate(longer, 8, mode="baseline").token_ids
    assert engine.generate(longer, 8, mode="prefix_cache").token_ids == want


def test_who_hears_of_tokens_may_use_the_engine(engine: KVBoost) -> None:
    """What is read and stored there is of the model as it is then."""
    first, second = random_ids(60, seed=5), random_ids(60, seed=6)

    class Using(Streamer):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.heard) == 3:
                engine.warm(first)
                change(engine, -2.0)
                engine.warm(second)

    engine.generate(random_ids(40, seed=7), 6, mode="prefix_cache", streamer=Using())
    for known in (first, second):
        longer = [*known, *random_ids(6, seed=4)]
        want = engine.generate(longer, 8, mode="baseline").token_ids
        assert engine.generate(longer, 8, mode="prefix_cache").token_ids == want


def test_an_abandoned_stream_is_cleaned_up_by_the_next(engine: KVBoost) -> None:
    prompts = [[*random_ids(60, seed=8), *random_ids(5, seed=number)] for number in range(3)]
    wants = [engine.generate(prompt, 20, mode="baseline").token_ids for prompt in prompts]
    taken = engine.stream_many(prompts, 20, mode="prefix_cache")
    next(taken)
    del taken
    before = forwards(engine)
    assert engine.generate(prompts[2], 20, mode="prefix_cache").token_ids == wants[2]
    assert forwards(engine) > before


def test_an_abandoned_stream_takes_no_lock(engine: KVBoost) -> None:
    """It may be collected as garbage while its thread holds any lock of ours."""
    taken = engine.stream_many([random_ids(60, seed=8), random_ids(50, seed=9)], 30, mode="prefix_cache")
    running = threading.Event()

    def use() -> None:
        for _ in taken:
            break
        with engine.core.resident._lock:
            taken.close()  # type: ignore[attr-defined]
        running.set()

    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    assert running.wait(30)


def test_a_split_node_is_found_again(engine: KVBoost) -> None:
    shared = random_ids(64, seed=1)
    first, second = ([*shared, *random_ids(64, seed=number)] for number in (2, 3))
    for prompt in (first, second):
        engine.generate(prompt, 2, mode="prefix_cache")
    tree = engine.core.resident._scheduler.radix_tree  # type: ignore[union-attr]
    for prompt in (first, second):
        assert engine.generate(prompt, 2, mode="prefix_cache").cached_tokens == 127
    assert tree.tokens <= 64 + 2 * 64


def test_a_capture_that_fails_loses_no_answer(engine: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = random_ids(40, seed=8)
    want = engine.generate(prompt, 7, mode="baseline").token_ids

    def failing(_self: Scheduler, _sizes: Any = None) -> None:
        raise NotImplementedError

    monkeypatch.setattr(Scheduler, "capture", failing)
    for _ in range(3):
        assert engine.generate(prompt, 7, mode="prefix_cache").token_ids == want


def test_a_step_that_fails_runs_alone(engine: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = random_ids(40, seed=8)
    want = engine.generate(prompt, 7, mode="baseline").token_ids

    def out_of_memory(*_args: Any) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("none left")

    monkeypatch.setattr(PackedModel, "_eager", out_of_memory)
    assert engine.generate(prompt, 7, mode="prefix_cache").token_ids == want
