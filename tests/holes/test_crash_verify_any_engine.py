"""verify_correctness judges every engine that can be made: it raises for none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvboost import KVBoost
from kvboost.errors import InvalidRequestError
from kvboost.proof import checks
from tests.fixture_types import MakeEngine
from tests.tiny_models import ARCHITECTURES, LENGTH_DEPENDENT, random_ids, tiny_model

PROMPT = random_ids(120, 5)
ENGINES: list[dict[str, Any]] = [
    {"chunk_boundary_window": 4},
    {"chunk_boundary_window": 15},
    {"chunk_boundary_window": 4, "overlap_k": 4, "sink_tokens": 4},
    {"chunk_boundary_window": 4, "kv_cache_bits": 8},
    {"overlap_k": 8},
    {"sink_tokens": 4},
    {"overlap_k": 8, "sink_tokens": 4, "kv_cache_bits": 4},
    {"kv_cache_bits": 8},
    {"kv_cache_bits": "k8v4"},
    {"kv_cache_bits": 4},
    {"kv_cache_bits": None},
    {"bit_exact": True},
    {"bit_exact": True, "chunk_size": 300},
    {"recompute_ratio": "auto", "max_kl": 0.5},
    {"recompute_ratio": "auto", "max_kl": 1e-9},
    {"recompute_ratio": 0.0},
    {"recompute_ratio": 1.0},
    {"recompute_strategy": "none"},
    {"recompute_strategy": "cacheblend"},
    {"recompute_strategy": "selective", "recompute_overlap": 0},
    {"selector": "deviation"},
    {"selector": "deviation", "recompute_strategy": "cacheblend", "recompute_ratio": "auto", "max_kl": 0.1},
    {"cache_device": "model"},
    {"max_chunks": 0},
    {"max_chunks": 1},
    {"max_cache_bytes": 0},
    {"max_cache_bytes": 10_000},
    {"chunk_size": 1},
    {"chunk_size": 500},
    {"chunk_size": 700, "chunk_boundary_window": 600},
    {"prefill_block": 1},
    {"prefill_block": 7},
    {"cache_salt": "mine"},
    {"pack_weights": False},
]


def judge(engine: KVBoost, **options: Any) -> Any:
    report = engine.verify_correctness([PROMPT, [7], "some text"], 4, **options)
    assert len(report.prompts) == 3
    assert {verdict.kind for verdict in report.verdicts} == {"exact", "quantized", "approximate"}
    assert str(report)
    assert report.to_dict()["failed"] == report.failed
    return report


@pytest.mark.parametrize("options", ENGINES, ids=str)
def test_any_setting(make_engine: MakeEngine, options: dict[str, Any]) -> None:
    engine = make_engine(**options)
    report = judge(engine)
    assert report.failed == [], str(report)
    assert report or engine.is_quantized or engine.is_lossy, str(report)


@pytest.mark.parametrize("mode", ["baseline", "prefix_cache", "chunk_kv_reuse"])
def test_any_mode(make_engine: MakeEngine, mode: str) -> None:
    report = judge(make_engine(chunk_boundary_window=4), mode=mode)
    assert report.failed == []


def test_a_cache_on_disk(make_engine: MakeEngine, tmp_path: Path) -> None:
    for options in ({"disk_cache_bytes": 100_000}, {"max_chunks": 1}, {"kv_cache_bits": 8}, {}):
        engine = make_engine(disk_cache_dir=tmp_path / str(len(options)), **options)
        assert judge(engine).failed == []


@pytest.mark.parametrize("name", [*ARCHITECTURES, *LENGTH_DEPENDENT])
def test_any_model_with_sliding_cuts(make_engine: MakeEngine, name: str) -> None:
    """Windows, length-dependent rope and the rest, with an option that once made it raise."""
    report = judge(make_engine(name, chunk_boundary_window=4))
    assert report.failed == [], str(report)


@pytest.mark.parametrize("positions", [24, 40, 64, 130])
@pytest.mark.parametrize("options", [{}, {"chunk_boundary_window": 4, "kv_cache_bits": 8}], ids=str)
def test_a_model_with_little_room(make_engine: MakeEngine, positions: int, options: dict[str, Any]) -> None:
    engine = make_engine(model=tiny_model("llama", max_position_embeddings=positions), **options)
    report = engine.verify_correctness(max_new_tokens=4)
    assert report.failed == [], str(report)
    report = engine.verify_correctness([[7], [8, 9]], 2)
    assert report.failed == [], str(report)


def test_prompts_that_have_no_room_are_refused_by_number(make_engine: MakeEngine) -> None:
    engine = make_engine(model=tiny_model("llama", max_position_embeddings=64))
    with pytest.raises(InvalidRequestError, match=r"prompt 1: .*124 positions.* the model has 64"):
        engine.verify_correctness([[7], PROMPT], 4)


def test_a_model_that_asks_for_its_own_ways_of_generating(make_engine: MakeEngine) -> None:
    model = tiny_model("llama")
    model.generation_config.repetition_penalty = 1.3
    model.generation_config.min_new_tokens = 2
    assert judge(make_engine(model=model)).failed == []


@pytest.mark.parametrize(
    ("error", "verdict"),
    [(RuntimeError("broken"), False), (InvalidRequestError("not with this"), None), (MemoryError(), None)],
    ids=str,
)
def test_a_part_that_raises_is_named(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, error: Exception, verdict: bool | None
) -> None:
    def broken(*_args: Any, **_kwargs: Any) -> Any:
        raise error

    monkeypatch.setattr(checks, "sparse_forward", broken)
    report = judge(make_engine())
    part = next(check for check in report.checks if check.name == "sparse pass")
    assert part.passed is verdict
    assert type(error).__name__ in part.detail
    assert report.failed == (["sparse pass"] if verdict is False else [])
