"""A kernel that cannot be made is not tried again, and the caller goes the other way."""

from __future__ import annotations

import pytest
import torch

from kvboost.kernels import fallback, turning
from kvboost.kv.layout import KVLayout
from kvboost.kv.rope import KeyRotation, Turn


@pytest.fixture(autouse=True)
def nothing_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "_FAILED", set())


def test_what_failed_is_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    tried = []

    def launch() -> None:
        tried.append(1)
        raise RuntimeError("no such instruction")

    assert not fallback.launched("something", launch)
    assert not fallback.launched("something", launch)
    assert len(tried) == 1
    assert caplog.text.count("no such instruction") == 1
    assert fallback.launched("something else", lambda: None)


def test_memory_that_runs_out_is_no_fault_of_the_kernel() -> None:
    def launch() -> None:
        raise torch.cuda.OutOfMemoryError("full")

    with pytest.raises(torch.cuda.OutOfMemoryError):
        fallback.launched("something", launch)
    assert fallback.launched("something", lambda: None)


def test_keys_are_turned_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    past = tuple((torch.randn(1, 2, 40, 8), torch.randn(1, 2, 40, 8)) for _ in range(2))
    layout = KVLayout.of(past)
    rotation = KeyRotation((Turn((1.0, 0.1, 0.01, 0.001), False),) * 2)
    slabs = [part.unsqueeze(0) for part in layout.pack(past)]
    wanted = [slab.clone() for slab in slabs]
    stretches = [(3, 9, 5), (10, 30, -4), (31, 31, 2), (35, 40, 0)]
    for start, end, shift in stretches:
        rotation.rotate_(wanted, layout, start, end, shift)
    monkeypatch.setattr(turning, "can_turn", lambda _slab: True)
    monkeypatch.setattr(turning, "turn", lambda *_args, **_kwargs: 1 / 0)
    rotation.rotate_all_(slabs, layout, stretches)
    assert all(map(torch.equal, slabs, wanted))
    assert {"turning keys"} == fallback._FAILED
