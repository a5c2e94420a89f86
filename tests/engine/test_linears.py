"""The oneDNN linear layers agree with torch's own and leave nothing behind."""

from __future__ import annotations

import pytest
import torch

from kvboost import linears


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
