"""`kvboost bench rag`: what contestants get to see, the three parts, and that a target can be missed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost.bench import plots, rag
from kvboost.bench.rag import RagSettings
from kvboost.choices import GenerationMode, Origin
from kvboost.models import GenerationResult, Span

SMALL = RagSettings(
    documents=3,
    prompt_tokens=900,
    ratios=(0.10, 0.15),
    rounds=4,
    pairs=3,
    cold_tokens=200,
    chats=2,
    turns=4,
)
TIMES_MS = {"baseline": 1_000.0, "prefix_cache": 990.0, "guided": 180.0, "deviation": 230.0}


class FakeModel:
    dtype = torch.float32

    def get_input_embeddings(self) -> Any:
        return torch.nn.Embedding(2, 2)


class FakeEngine:
    """Answers in a fixed time, finds what it was given, and writes down what was asked of it."""

    def __init__(
        self, tokenizer: Any, log: list[Any], selector: str = "", recompute_ratio: float = 0.0
    ) -> None:
        self.model = FakeModel()
        self.tokenizer = tokenizer
        self.selector, self.ratio = selector, recompute_ratio
        self.log = log
        self.warmed: list[Any] = []
        self.closed = False

    def warm(self, prompt: Any) -> None:
        self.warmed.append(prompt)

    def clear(self) -> None:
        self.warmed.clear()

    def close(self) -> None:
        self.closed = True

    def generate(
        self, prompt: Any, max_new_tokens: int, *, mode: GenerationMode, min_new_tokens: int
    ) -> GenerationResult:
        assert max_new_tokens == min_new_tokens
        is_chat = not isinstance(prompt[0], int)
        self.log.append((self, [*prompt], mode, [*self.warmed]))
        text = str(prompt) if is_chat else self.tokenizer.decode(prompt)
        is_ours = mode is GenerationMode.CHUNK_KV_REUSE
        total = len(text)
        cached = total // 2 if is_ours and "Document" in text else 0
        is_later_turn = is_chat and len(prompt) > 1
        recomputed = 0 if is_later_turn else int(cached * self.ratio)
        ttft = TIMES_MS[
            "nothing_found" if is_ours and not cached else self.selector if is_ours else mode.value
        ]
        if is_later_turn:
            ttft = 50.0
        spans = [
            (0, cached - recomputed, Origin.APPROXIMATE),
            (cached - recomputed, cached, Origin.RECOMPUTED),
            (cached, total, Origin.LIVE),
        ]
        return GenerationResult(
            mode=mode.value,
            prompt=text,
            output_text="An answer.",
            generated_tokens=2,
            ttft_ms=ttft,
            total_ms=ttft,
            tokens_per_sec=1.0,
            kv_reuse_ratio=cached / total,
            prompt_tokens=total,
            cached_tokens=cached,
            token_ids=[5, 6],
            spans=tuple(Span(*span) for span in spans if span[0] < span[1]),
            recomputed_tokens=recomputed,
        )


@pytest.fixture
def log() -> list[Any]:
    return []


@pytest.fixture
def record(tokenizer: Any, log: list[Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setitem(TIMES_MS, "nothing_found", 1_010.0)  # with nothing to reuse
    opened: list[FakeEngine] = []

    def open_engine(**options: Any) -> FakeEngine:
        opened.append(FakeEngine(tokenizer, log, **options))
        return opened[-1]

    steps: list[tuple[int, int, str]] = []
    found = rag.run(FakeEngine(tokenizer, log), "fake", SMALL, open_engine, lambda *step: steps.append(step))
    assert [(one.selector, one.ratio, one.closed) for one in opened] == [
        ("guided", 0.10, True),
        ("deviation", 0.10, True),
        ("guided", 0.15, True),
        ("deviation", 0.15, True),
    ]
    assert [step[:2] for step in steps] == [(done, 35) for done in range(35)]  # 4 x 6 + 3 + 2 x 4
    return found


def test_contestants_get_the_same_prompts_and_only_the_documents(
    record: dict[str, Any], log: list[Any], tokenizer: Any
) -> None:
    rounds = log[:24]
    prompts = [entry[1] for entry in rounds]
    for first in range(0, 24, 6):
        assert all(prompt == prompts[first] for prompt in prompts[first : first + 6])
    assert len({tuple(prompt) for prompt in prompts}) == 4
    for _, prompt, mode, warmed in rounds:
        assert len(warmed) == (0 if mode is GenerationMode.BASELINE else 3)
        assert all(tokenizer.decode(ids) in tokenizer.decode(prompt) for ids in warmed)
    first_ones = [log[first][2] for first in range(0, 24, 6)]
    assert first_ones[:2] == [GenerationMode.BASELINE, GenerationMode.PREFIX_CACHE]  # they take turns
    assert list(record["contestants"]) == [
        "baseline",
        "prefix cache",
        "guided 10%",
        "deviation 10%",
        "guided 15%",
        "deviation 15%",
    ]


def test_times_and_shares(record: dict[str, Any]) -> None:
    guided = record["contestants"]["guided 10%"]
    assert guided["ttft_ms"]["median"] == 180
    assert guided["ttft_ms"]["count"] == guided["rounds"] == guided["same_first_token"] == 4
    assert guided["speedup"] == pytest.approx(5.56)
    assert guided["cached_share"] == pytest.approx(0.5, abs=0.01)
    assert guided["recomputed_share"] == pytest.approx(0.05, abs=0.01)
    assert record["contestants"]["baseline"]["cached_share"] == 0


def test_prompts_with_nothing_in_common(record: dict[str, Any], log: list[Any], tokenizer: Any) -> None:
    cold = log[24:32]  # one pair to warm up and three that count
    assert all(len(entry[1]) == 200 for entry in cold)
    assert len({tuple(entry[1]) for entry in cold}) == 4
    modes = [entry[2] for entry in cold]
    assert modes[0] is modes[3] is modes[4] is GenerationMode.BASELINE  # the order alternates
    assert len(set(modes)) == 2
    for _, prompt, _, warmed in cold:
        assert len(warmed) == 3
        text = tokenizer.decode(prompt)
        assert not any(
            text[start : start + 60] in tokenizer.decode(ids) for ids in warmed for start in (0, 100)
        )
    guess = record["wrong_guess"]
    assert (guess["pairs"], guess["cached_tokens"], guess["ratio_of_medians"]) == (3, 0, 1.01)


def test_a_chat_repairs_once(record: dict[str, Any], log: list[Any]) -> None:
    chat = log[32:]
    assert len(chat) == 2 * 4 * 2
    ours = [entry for entry in chat if entry[2] is GenerationMode.CHUNK_KV_REUSE][:4]
    assert [len(entry[1]) for entry in ours] == [1, 3, 5, 7]
    assert [message["role"] for message in ours[3][1]] == [*(["user", "assistant"] * 3), "user"]
    assert len({message["content"] for message in ours[3][1][:6:2]}) == 3  # other questions
    assert [turn["turn"] for turn in record["chat"]] == [1, 2, 3, 4]
    repaired = [turn["approximate"]["recomputed_tokens"] for turn in record["chat"]]
    assert repaired[0] > 0
    assert repaired[1:] == [0, 0, 0]
    origins = record["chat"][1]["approximate"]["origins"]
    assert set(origins) == {"exact", "approximate", "recomputed", "live"}
    assert sum(origins.values()) == record["chat"][1]["approximate"]["prompt_tokens"]


def test_good_figures_meet_all_targets(record: dict[str, Any]) -> None:
    assert [target["name"] for target in record["targets"] if not target["met"]] == []
    assert len(record["targets"]) == 7


@pytest.mark.parametrize(
    ("name", "time_ms", "missed"),
    [
        (
            "guided",
            240.0,
            ["baseline / guided 10%", "deviation / guided at 10%", "deviation / guided at 15%"],
        ),
        ("deviation", 170.0, ["deviation / guided at 10%", "deviation / guided at 15%"]),
        ("nothing_found", 1_060.0, ["nothing in common / baseline"]),
    ],
)
def test_bad_figures_miss_their_target(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, name: str, time_ms: float, missed: list[str]
) -> None:
    monkeypatch.setitem(TIMES_MS, "nothing_found", 1_000.0)
    monkeypatch.setitem(TIMES_MS, name, time_ms)
    log: list[Any] = []
    record = rag.run(
        FakeEngine(tokenizer, log),
        "fake",
        replace(SMALL, chats=0),
        lambda **options: FakeEngine(tokenizer, log, **options),
    )
    assert record["chat"] is None
    assert [target["name"] for target in record["targets"] if not target["met"]] == missed


def test_a_chat_that_repairs_every_turn_misses_its_target() -> None:
    def turn(ttft: float, recomputed: int) -> dict[str, Any]:
        return {
            "approximate": {"ttft_ms": {"median": ttft}, "recomputed_tokens": recomputed},
            "exact": {"ttft_ms": {"median": 100.0}},
        }

    for later, met in (((110.0, 0), [True, True]), ((130.0, 0), [False, True]), ((110.0, 5), [True, False])):
        found = rag.targets({}, None, [turn(900.0, 400), turn(*later)], SMALL)
        assert [target["met"] for target in found] == met


def test_the_plot(record: dict[str, Any], tmp_path: Path) -> None:
    paths = plots.plot_first_tokens(record, tmp_path)
    assert [path.name for path in paths] == ["rag-cpu.svg", "rag-cpu.png"]
    assert paths[1].read_bytes().startswith(b"\x89PNG")
