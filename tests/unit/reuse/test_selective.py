"""Which tokens selective recompute takes at the seams."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from kvboost import SelectiveRecompute
from kvboost.errors import InvalidRequestError
from kvboost.models import AssembledPrompt, ReusedRun
from kvboost.reuse import repair
from kvboost.reuse.repair import live_positions, positions_of, runs_of

EXACT = ReusedRun(0, 20, 0, True)
FIRST = ReusedRun(20, 50, 3, False)
SECOND = ReusedRun(60, 100, -5, False)


def chosen(strategy: SelectiveRecompute, runs: Sequence[ReusedRun]) -> list[int]:
    nothing: Any = None
    positions = strategy.choose(nothing, nothing, nothing, runs)
    assert positions.dtype.kind == "i"
    return positions.tolist()


def spans(*pairs: tuple[int, int]) -> list[int]:
    return [position for start, end in pairs for position in range(start, end)]


@pytest.mark.parametrize(
    ("strategy", "runs", "expected"),
    [
        (SelectiveRecompute(4), [EXACT, FIRST, SECOND], spans((20, 24), (60, 64))),
        (SelectiveRecompute(4, side="before"), [EXACT, FIRST, SECOND], []),  # exact or live before them
        (SelectiveRecompute(4, side="before"), [FIRST, ReusedRun(50, 60, 9, False)], spans((46, 50))),
        (SelectiveRecompute(4, side="before"), [EXACT, FIRST, ReusedRun(52, 60, 9, False)], spans((48, 50))),
        (SelectiveRecompute(16), [ReusedRun(30, 40, 0, False)], spans((30, 40))),  # shorter than the overlap
        (SelectiveRecompute(16), [ReusedRun(30, 40, 0, False), SECOND], spans((30, 40), (60, 76))),
        (SelectiveRecompute(16), [ReusedRun(0, 40, 0, False)], []),  # nothing stood before it
        (SelectiveRecompute(4), [EXACT], []),
        (SelectiveRecompute(4), [], []),
        (SelectiveRecompute(0), [EXACT, FIRST, SECOND], []),
        (SelectiveRecompute(0, side="before"), [EXACT, FIRST, SECOND], []),
        (SelectiveRecompute(4, skip_if_no_seams=False), [EXACT], spans((16, 20))),
        (SelectiveRecompute(99, skip_if_no_seams=False), [EXACT], spans((0, 20))),
        (SelectiveRecompute(4, skip_if_no_seams=False), [EXACT, FIRST], spans((20, 24))),
        (SelectiveRecompute(4, skip_if_no_seams=False), [], []),
    ],
)  # fmt: skip
def test_the_tokens_at_the_seams(
    strategy: SelectiveRecompute, runs: list[ReusedRun], expected: list[int]
) -> None:
    assert chosen(strategy, runs) == expected


def test_the_contracts_defaults() -> None:
    plain = SelectiveRecompute()
    assert (plain.recompute_overlap, plain.skip_if_no_seams, plain.device) == (16, True, "cpu")
    assert chosen(plain, [EXACT, FIRST]) == spans((20, 36))


@pytest.mark.parametrize("options", [{"recompute_overlap": -1}, {"side": "both"}])
def test_bad_options(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(InvalidRequestError, match=name):
        SelectiveRecompute(**options)


def prompt_of(boundaries: list[tuple[int, int]], **options: Any) -> AssembledPrompt:
    return AssembledPrompt(
        full_token_ids=list(range(100)),
        cached_past_kv=None,
        cached_length=sum(end - start for start, end in boundaries),
        live_token_ids=[],
        live_position_ids=[],
        chunk_boundaries=boundaries,
        cache_hit_ratio=0.5,
        **options,
    )


def test_a_prompt_that_names_no_runs_has_a_seam_at_every_chunk() -> None:
    assert runs_of(prompt_of([(0, 16), (16, 32), (40, 56)])) == [
        ReusedRun(0, 16, 0, True),
        ReusedRun(16, 32, 0, False),
        ReusedRun(40, 56, 0, False),
    ]
    assert runs_of(prompt_of([(0, 16)], has_approximate=True)) == [ReusedRun(0, 16, 0, False)]
    named = (tuple(FIRST), tuple(SECOND))
    assert runs_of(prompt_of([(0, 16)], runs=named)) == [FIRST, SECOND]


def test_positions() -> None:
    runs = [EXACT, FIRST, SECOND]
    assert positions_of(runs).tolist() == spans((0, 50), (60, 100))
    assert positions_of(runs, exact=True).tolist() == spans((0, 20))
    assert positions_of(runs, exact=False).tolist() == spans((20, 50), (60, 100))
    assert positions_of([]).tolist() == []
    assert live_positions(runs, 110).tolist() == spans((50, 60), (100, 110))
    assert live_positions(runs, 55).tolist() == spans((50, 55))


def test_without_seams_the_end_is_computed_again_where_it_is_asked_for(
    make_llama: Callable[..., Any],
) -> None:
    model = make_llama()
    ids = list(range(10, 50))
    stock = DynamicCache()
    with torch.no_grad():
        model(torch.tensor([ids]), past_key_values=stock, use_cache=True)
    true = tuple((layer.keys.clone(), layer.values.clone()) for layer in stock.layers)
    worn = tuple((key.clone(), value.clone()) for key, value in true)
    for key, _ in worn:
        key[:, :, 28:32] += 1.0
    assembled = dataclasses.replace(
        prompt_of([(0, 32)], runs=((0, 32, 0, True),)),
        full_token_ids=ids,
        cached_past_kv=tuple((key[:, :, :32], value[:, :, :32]) for key, value in worn),
    )
    assert SelectiveRecompute(4).apply(assembled, model) is assembled
    again = SelectiveRecompute(4, skip_if_no_seams=False).apply(assembled, model).cached_past_kv
    assert again is not None
    for (key, _), (wanted, _) in zip(again, true, strict=True):
        torch.testing.assert_close(key, wanted[:, :, :32], rtol=1e-4, atol=1e-5)


def test_nothing_cached_is_nothing_to_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_args: Any, **_options: Any) -> np.ndarray:
        raise AssertionError("there is nothing to repair")

    monkeypatch.setattr(repair, "complete", never)
    empty = prompt_of([])
    assert SelectiveRecompute(skip_if_no_seams=False).apply(empty, model=None) is empty
