"""`bench mixtures` and `bench homes`: what they measure, on a tiny model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.suite import homes
from benchmarks.suite.mixtures import MixtureSettings, mixtures, run, targets
from kvboost.errors import InvalidRequestError
from tests.fixture_types import MakeEngine
from tests.tiny_models import long_model


def test_mixtures_cover_what_they_should() -> None:
    found = mixtures(MixtureSettings())
    assert len(found) == 20
    assert [each.tokens for each in found] == sorted(each.tokens for each in found)
    assert (found[0].tokens, found[-1].tokens) == (500, 32_000)
    assert min(each.known for each in found) == 0.1
    assert max(each.known for each in found) == 1.0
    assert all(1 <= each.documents <= 30 for each in found)
    assert max(each.documents for each in found) > 15
    assert sum(each.must_reuse for each in found) >= 3


@pytest.mark.usefixtures("approximate_reuse")
def test_known_parts_are_found(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.engine.reuse_checks import pay_always

    pay_always(monkeypatch)
    engine = make_engine(model=long_model(), chunk_size=32)
    record = run(engine, "tiny", MixtureSettings(mixtures=3, shortest=300, longest=900, rounds=1))
    assert record["benchmark"] == "mixtures"
    for row in record["rows"]:
        assert abs(row["cached_share"] - row["known"]) < 0.25
        assert row["ratio"] > 0


def row(ratio: float, *, must: bool, reused: bool) -> dict[str, Any]:
    return {"ratio": ratio, "must_reuse": must, "reused": reused}


def test_targets_of_mixtures() -> None:
    good = [row(1.04, must=False, reused=False), row(0.5, must=True, reused=True)]
    assert [each["met"] for each in targets(good)] == [True, True]
    bad = [row(1.06, must=False, reused=False), row(0.5, must=True, reused=False)]
    assert [each["met"] for each in targets(bad)] == [False, False]


def test_targets_of_homes() -> None:
    def lies(ms: float) -> dict[str, Any]:
        return {"ttft_ms": {"median": ms}}

    times = {"device 16": 10, "device 8": 12, "device 4": 13, "host 16": 35, "host 8": 30, "host 4": 50}
    rows = [
        {
            "cached_tokens": 8192,
            "bare_copy_ms": {"median": 20.0},
            "homes": {name: lies(ms) for name, ms in times.items()},
        }
    ]
    found = homes.targets(rows)
    assert [each["met"] for each in found] == [True, True, False, True, False]
    assert found[0]["value"] == round(35 / 36, 3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_homes_need_a_gpu(make_engine: MakeEngine) -> None:
    with pytest.raises(InvalidRequestError, match="needs a GPU"):
        homes.run(make_engine("llama"), "tiny", homes.HomeSettings(), make_engine)
