"""The oneDNN linear layers agree with torch's own and leave nothing behind."""

from __future__ import annotations

import gc

import pytest
import torch

from kvboost.kernels import linears
from tests.fixture_types import MakeEngine


@pytest.mark.parametrize("shape", [(1, 1), (2, 5), (1, 64), (1, 65), (3, 40)])
@pytest.mark.parametrize("bias", [True, False])
def test_same_numbers(shape: tuple[int, int], bias: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(48, 33, bias=bias), torch.nn.Linear(33, 7, bias=bias))
    rows = torch.randn(*shape, 48)
    with torch.no_grad():
        expected = model(rows)
        with linears.faster(model):
            result = model(rows)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
    assert all("forward" not in vars(module) for module in model)


def test_few_numbers_of_rows_are_used() -> None:
    """Every one costs a kernel: time and memory."""
    used = {rows: linears._rows_used(rows) for rows in range(1, 3_000)}
    assert len(set(used.values()) - {0}) <= 52
    assert all(number in (0, *range(rows, rows + 64)) for rows, number in used.items())
    assert [used[rows] for rows in (1, 20, 32, 33, 64, 65, 120, 250, 256, 1_024, 1_025)] == [
        *(1, 20, 32, 40, 64, 0, 128, 256, 256, 1_024, 0)
    ]


def test_other_layers_are_left_alone() -> None:
    class Special(torch.nn.Linear):
        pass

    half = torch.nn.Linear(8, 8, dtype=torch.bfloat16)
    special = Special(8, 8)
    patched = torch.nn.Linear(8, 8)
    patched.forward = lambda rows: rows  # type: ignore[method-assign]
    model = torch.nn.ModuleList([half, special, patched])
    with linears.faster(model):
        assert "forward" not in vars(half)
        assert "forward" not in vars(special)
        assert torch.equal(patched(torch.ones(1, 8)), torch.ones(1, 8))
    assert "forward" in vars(patched)


def test_switched_off_where_the_operator_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    linears._onednn_linear.cache_clear()
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", lambda *_args: torch.zeros(3, 24))
    assert linears._onednn_linear() is None
    linears._onednn_linear.cache_clear()


class TestPacking:
    """Weights in oneDNN's order: the same numbers, and never those of weights that changed since."""

    @staticmethod
    def outputs(model: torch.nn.Module, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            expected = model(rows)
            with linears.faster(model):
                return model(rows), expected

    @pytest.mark.parametrize("rows", [1, 2, 16, 17, 21, 63, 65, 120, 128, 300, 1020, 1025])
    @pytest.mark.parametrize("bias", [True, False])
    def test_same_numbers(self, rows: int, bias: bool) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(48, 33, bias=bias), torch.nn.Linear(33, 7, bias=bias))
        linears.pack(model)
        assert linears.packed_bytes(model) == 4 * (48 * 33 + 33 * 7)
        result, expected = self.outputs(model, torch.randn(1, rows, 48))
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("change", ["in place", "through .data", "replaced", "as adapters merge"])
    def test_changed_weights_are_seen(self, change: str) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(48, 33))
        layer = model[0]
        linears.pack(model)
        before, _ = self.outputs(model, torch.ones(1, 48))
        with torch.no_grad():
            if change == "in place":
                layer.weight.mul_(2)
            elif change == "through .data":
                layer.weight.data.mul_(2)
            elif change == "replaced":
                layer.weight = torch.nn.Parameter(layer.weight * 2)
            else:
                layer.weight.data += torch.randn(33, 2) @ torch.randn(2, 48)
        after, expected = self.outputs(model, torch.ones(1, 48))
        torch.testing.assert_close(after, expected, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(after, before)

    def test_only_where_memory_allows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(64, 64))
        monkeypatch.setattr(linears, "_memory_bytes", lambda: 8 * 64 * 64 * 4 - 1)
        linears.pack(model)
        assert linears.packed_bytes(model) == 0
        linears.pack(model, wanted=True)
        assert linears.packed_bytes(model) == 64 * 64 * 4
        other = torch.nn.Sequential(torch.nn.Linear(8, 8))
        linears.pack(other, wanted=False)
        assert linears.packed_bytes(other) == 0

    def test_copies_go_with_the_model(self) -> None:
        gc.collect()
        count = len(linears._PACKS)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8))
        linears.pack(model)
        assert len(linears._PACKS) == count + 1
        del model
        gc.collect()
        assert len(linears._PACKS) == count

    def test_the_engine_counts_them(self, make_engine: MakeEngine) -> None:
        packed = make_engine("llama")
        assert packed.cache_stats()["packed_weights_bytes"] > 0
        assert make_engine("llama", bit_exact=True).cache_stats()["packed_weights_bytes"] == 0
        assert make_engine("llama", pack_weights=False).cache_stats()["packed_weights_bytes"] == 0
