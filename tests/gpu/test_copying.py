"""Copies in one launch: runs of any length, from the device and from pinned memory, and an engine on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvboost.kernels import copying
from kvboost.kernels.copying import Run
from kvboost.kv.arena import Arena
from kvboost.kv.codec import KVCodec, Placement, StoredKV, place_all
from kvboost.kv.layout import KVLayout
from kvboost.kv.pinned import POOL
from kvboost.models import PastKVType
from tests.fixture_types import MakeEngine
from tests.tiny_models import random_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("where", ["device", "pinned", "both"])
@pytest.mark.parametrize(
    ("rows", "head_dim", "dtype"),
    [(512, 128, torch.bfloat16), (6, 80, torch.float16), (4, 4, torch.float32), (3, 256, torch.float32)],
)
def test_runs_go_where_they_belong(rows: int, head_dim: int, dtype: torch.dtype, where: str) -> None:
    slab = torch.randn(rows, 900, head_dim, device="cuda").to(dtype)
    assert copying.takes_runs(slab)
    runs, at = [], 3
    for number, (tokens, first, length) in enumerate([(128, 0, 128), (7, 3, 1), (200, 11, 150), (1, 0, 1)]):
        tensor = torch.randn(rows, tokens, head_dim).to(dtype)
        if where == "device" or (where == "both" and number % 2):
            tensor = tensor.cuda()
        else:
            tensor = POOL.empty(tuple(tensor.shape), dtype).copy_(tensor)
        assert copying.is_reachable(tensor)
        runs.append(Run(tensor, first, length, at))
        at += length + 2
    want = slab.clone()
    for tensor, first, length, slot in runs:
        want[:, slot : slot + length] = tensor[:, first : first + length].cuda()
    copying.copy_in(slab, runs)
    assert torch.equal(slab, want)
    slab.normal_()
    copies = [run.tensor.clone() for run in runs]
    copying.copy_out(slab, runs)
    torch.cuda.synchronize()
    for (tensor, first, length, slot), copy in zip(runs, copies, strict=True):
        copy[:, first : first + length] = slab[:, slot : slot + length].to(copy.device)
        assert torch.equal(tensor, copy)


def test_what_does_not_fit_is_not_taken() -> None:
    assert not copying.takes_runs(torch.zeros(2, 8, 3, device="cuda"))
    assert not copying.takes_runs(torch.zeros(2, 8, 4, device="cuda").transpose(0, 1))
    assert not copying.takes_runs(torch.zeros(2, 8, 4))
    assert not copying.is_reachable(torch.zeros(2, 8, 4))
    assert not copying.is_reachable(torch.zeros(4, 8, 4, device="cuda")[:, 1:])


@pytest.mark.parametrize("cache_device", ["cpu", "model"])
def test_chunks_are_placed_in_one_launch(
    cache_device: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine("llama", device="cuda", cache_device=cache_device)
    launched: list[int] = []
    copy_in = copying.copy_in

    def counting(slab: torch.Tensor, runs: list[Run]) -> None:
        launched.append(len(runs))
        copy_in(slab, runs)

    prompt = random_ids(200, seed=1)
    want = engine.generate([*prompt, 5], 8, mode="baseline").token_ids
    engine.generate(prompt, 1, mode="prefix_cache")
    engine.core.resident.drop()
    monkeypatch.setattr(copying, "copy_in", counting)
    result = engine.generate([*prompt, 5], 8, mode="prefix_cache")
    assert result.token_ids == want
    assert result.cached_tokens >= 192
    assert len(launched) == 1
    assert launched[0] > 5


@pytest.mark.parametrize("bits", [8, 4, "k8v4"])
@pytest.mark.parametrize("head_dim", [24, 64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_quantized_chunks_are_decoded_in_one_launch(
    dtype: torch.dtype, head_dim: int, bits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def past(tokens: int) -> PastKVType:
        pairs = [(torch.randn(1, 2, tokens, head_dim), torch.randn(1, 2, tokens, head_dim)) for _ in range(3)]
        return tuple((key.cuda().to(dtype) * 5, value.cuda().to(dtype)) for key, value in pairs)

    layout = KVLayout.of(past(1))
    codec = KVCodec(layout, bits, torch.device("cpu"))
    lengths = (50, 7, 128, 1)
    chunks = [codec.encode(layout.pack(past(tokens))) for tokens in lengths]
    spans = [(3, 0, 50), (60, 2, 6), (70, 33, 128), (200, 0, 1)]
    placements = [Placement(chunk, *span) for chunk, span in zip(chunks, spans, strict=True)]
    found, wanted = Arena(layout, 260), Arena(layout, 260)
    for kv, start, offset, end in placements:
        kv.place(wanted, start, offset, end)
    monkeypatch.delattr(StoredKV, "place")  # nobody takes the long way
    place_all(placements, found)
    one_rounding = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for slab, other in zip(found.slabs, wanted.slabs, strict=True):
        torch.testing.assert_close(slab.float(), other.float(), rtol=one_rounding, atol=one_rounding)
