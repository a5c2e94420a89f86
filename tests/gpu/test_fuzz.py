"""The fuzzer on a GPU: models change between and during requests, and graphs hold pointers into them."""

from __future__ import annotations

import pytest
import torch

from tests.fuzz import subject
from tests.fuzz.hunt import hunt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("kind", subject.KINDS)
def test_requests_on_a_model_that_changes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "DEVICE", "cuda")
    tally = hunt(subject.KINDS.index(kind), examples=3, steps=40, kinds=[kind])
    assert tally.near_ties <= max(1, tally.checks // 20)
    assert tally.checks > 15
    assert tally.hits > 3
