"""Quantized KV: errors stay within half a stored step, sizes are what they say, odd input is handled."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.errors import InvalidRequestError, UnstorableKVError
from kvboost.kv.quantize import KEYS, VALUES, dequantize_kv, quantize_kv
from kvboost.kv.quantized_tensor import QuantizedTensor, Scheme, dequantize, dequantize_into, quantize
from kvboost.models import PastKVType

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SCHEMES = [
    *KEYS.values(),
    *VALUES.values(),
    Scheme(4, "token", 64),
    Scheme(4, "channel", 32, keep_first=False),
    Scheme(8, "token", 16, hadamard=8),
]
IDS = [f"{s.bits}-{s.per}-{s.group}{'-hadamard' * (s.hadamard > 1)}" for s in SCHEMES]


def hadamard(head_dim: int, most: int) -> torch.Tensor:
    """Written down once more, by its definition: the sign is the parity of the common bits."""
    size = min(most, head_dim & -head_dim)
    signs = [[(-1) ** (i & j).bit_count() / math.sqrt(size) for j in range(size)] for i in range(size)]
    return torch.block_diag(*[torch.tensor(signs, dtype=torch.float64)] * (head_dim // size))


def steps_of(quantized: QuantizedTensor) -> torch.Tensor:
    """The stored step of every number, `[..., tokens, head_dim]`."""
    scheme, tokens = quantized.scheme, quantized.tokens
    steps = quantized.steps.double() * torch.pow(2.0, quantized.exponents.double())
    if scheme.per == "channel":
        return steps.repeat_interleave(scheme.group, -2)[..., :tokens, :]
    return steps.repeat_interleave(quantized.head_dim // steps.shape[-1], -1)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int, spread: float, offset: float) -> Any:
    """Channels of very different size, with an offset of their own each."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(spread * torch.randn(shape[-1], generator=generator))
    means = offset * torch.randn(shape[-1], generator=generator)
    numbers = torch.randn(shape, generator=generator) * sizes + means
    return numbers.clamp(-6e4, 6e4).to(dtype)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    heads, tokens, head_dim = (draw(st.integers(1, top)) for top in (3, 150, 130))
    dtype = draw(st.sampled_from(DTYPES))
    spread, offset = draw(st.floats(0, 4)), draw(st.floats(0, 100))
    tensor = random_tensor((1, heads, tokens, head_dim), dtype, draw(st.integers(0, 2**31)), spread, offset)
    if draw(st.booleans()):  # an outlier, as large as the type allows where it is a narrow one
        where = draw(st.integers(0, tokens - 1)), draw(st.integers(0, head_dim - 1))
        tensor[0, 0, where[0], where[1]] = draw(st.sampled_from((-6e4, 3e4, 1e-7, 65504)))
    if draw(st.booleans()):
        tensor[..., draw(st.integers(0, head_dim - 1))] = draw(st.sampled_from((0.0, 3.7, -1e-3)))
    return tensor


def ulp(size: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance between the numbers of that type around `size`."""
    numbers = size.to(dtype)
    below = torch.nextafter(numbers, torch.zeros_like(numbers))
    above = torch.nextafter(numbers, torch.full_like(numbers, math.inf))
    return torch.where(above.isinf(), numbers.double() - below.double(), above.double() - numbers.double())


@pytest.mark.parametrize("scheme", SCHEMES, ids=IDS)
@given(tensor=tensors())
@settings(deadline=None, max_examples=60)
def test_no_number_is_off_by_more_than_half_a_stored_step(scheme: Scheme, tensor: torch.Tensor) -> None:
    """In the coordinates that are quantized; with a Hadamard rotation those are the rotated ones."""
    scheme = dataclasses.replace(scheme, keep_first=False)
    quantized = quantize(tensor, scheme)
    back = dequantize(quantized, tensor.dtype if scheme.hadamard == 1 else torch.float64)
    wanted, got = tensor.double(), back.double()
    # The ulp of a group's largest number: sums and rotations are rounded at its size.
    largest = wanted.abs().amax((-2, -1), keepdim=True)
    slack = ulp(
        largest, torch.promote_types(tensor.dtype, torch.float32) if scheme.hadamard > 1 else tensor.dtype
    )
    if scheme.hadamard > 1:
        matrix = hadamard(tensor.shape[-1], scheme.hadamard)
        wanted, got = wanted @ matrix, got @ matrix
        slack = slack * 16  # the rotation adds up head_dim numbers
    assert ((got - wanted).abs() <= steps_of(quantized) / 2 + slack).all()


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s.hadamard == 1], ids=lambda s: f"{s.bits}-{s.per}")
@given(tensor=tensors())
@settings(deadline=None, max_examples=60)
def test_steps_are_no_larger_than_they_must_be(scheme: Scheme, tensor: torch.Tensor) -> None:
    """Half a step is a promise only if the step is small: the group's span over its levels."""
    scheme = dataclasses.replace(scheme, keep_first=False)
    quantized = quantize(tensor, scheme)
    wanted = tensor.double()
    span = wanted.amax((-2, -1), keepdim=True) - wanted.amin((-2, -1), keepdim=True)
    size = wanted.abs().amax((-2, -1), keepdim=True)
    # float16 rounds steps up by a thousandth, and minima down by a thousandth of their own size
    allowed = span / scheme.levels * 1.002 + size * 2.0**-10 / scheme.levels * 1.002 + size * 2.0**-30
    assert (steps_of(quantized) <= allowed).all()


@pytest.mark.parametrize("scheme", [KEYS[8], KEYS[4], VALUES[8], VALUES[4]], ids=["k8", "k4", "v8", "v4"])
@given(tensor=tensors())
@settings(deadline=None, max_examples=40)
def test_the_first_token_keeps_sixteen_bits(scheme: Scheme, tensor: torch.Tensor) -> None:
    back = dequantize(quantize(tensor, scheme), tensor.dtype)
    first, wanted = back[..., 0, :].double(), tensor[..., 0, :].double()
    size = tensor.double().abs().amax((-2, -1)).unsqueeze(-1)
    assert ((first - wanted).abs() <= wanted.abs() * 2.0**-11 + size * 2.0**-33).all()
    if tensor.dtype is torch.bfloat16:  # float16 holds all its digits
        assert ((first - wanted).abs() <= size * 2.0**-33).all()


@pytest.mark.parametrize("scheme", SCHEMES, ids=IDS)
@given(tensor=tensors(), data=st.data())
@settings(deadline=None, max_examples=40)
def test_any_stretch_of_tokens_is_the_same_as_in_the_whole(
    scheme: Scheme, tensor: torch.Tensor, data: st.DataObject
) -> None:
    quantized = quantize(tensor, scheme)
    whole = dequantize(quantized, tensor.dtype)
    start = data.draw(st.integers(0, quantized.tokens))
    end = data.draw(st.integers(start, quantized.tokens))
    part = dequantize(quantized, tensor.dtype, start, end)
    if scheme.hadamard > 1:  # matrix products of other shapes may add up in another order
        size = whole.abs().amax().double()
        slack = float(ulp(size, tensor.dtype)) + float(size) * 1e-6
        torch.testing.assert_close(part.double(), whole[..., start:end, :].double(), rtol=0, atol=slack)
    else:
        assert torch.equal(part, whole[..., start:end, :])


@pytest.mark.parametrize("scheme", SCHEMES, ids=IDS)
def test_decoding_into_a_strided_view_touches_nothing_else(scheme: Scheme) -> None:
    tensor = random_tensor((2, 3, 70, 20), torch.float32, 5, 1.0, 1.0)
    quantized = quantize(tensor, scheme)
    slab = torch.full((2, 6, 100, 20), 7.0)
    out = slab[:, ::2, 10:50]
    dequantize_into(quantized, out, start=20)
    torch.testing.assert_close(out, dequantize(quantized, torch.float32, 20, 60), rtol=1e-6, atol=1e-5)
    out.fill_(7.0)
    assert (slab == 7.0).all()


@pytest.mark.parametrize("scheme", SCHEMES, ids=IDS)
@given(tensor=tensors())
@settings(deadline=None, max_examples=30)
def test_encoding_what_was_decoded_hardly_adds_to_the_error(scheme: Scheme, tensor: torch.Tensor) -> None:
    """A tail that grows is encoded again with its chunk; where its groups are whole, that costs nothing."""
    quantized = quantize(tensor.float(), scheme)
    once = dequantize(quantized, torch.float64)
    again = dequantize(quantize(once, scheme), torch.float64)
    # a minimum that is off by a rounding error may go down by a float16's last digit
    slack = once.abs().amax((-2, -1), keepdim=True) * 2.0**-10 * 8 ** (scheme.hadamard > 1)
    rotated_steps = steps_of(quantized).amax() if scheme.hadamard > 1 else steps_of(quantized)
    assert ((again - once).abs() <= rotated_steps * 0.02 + slack).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bits", [8, 4, "k8v4"])
def test_what_is_not_finite_is_refused(bits: Any, value: float) -> None:
    kv = kv_of(tokens=5)
    kv[1][0][0, 1, 3, 2] = value
    with pytest.raises(UnstorableKVError, match="not finite"):
        quantize_kv(kv, bits)
    assert dequantize_kv(quantize_kv(kv, 16))[1][0] is kv[1][0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_numbers_that_could_come_back_as_infinity_are_refused(dtype: torch.dtype) -> None:
    kv = kv_of(tokens=5, dtype=dtype)
    kv[1][1][0, 1, 3, 2] = torch.finfo(dtype).max
    with pytest.raises(UnstorableKVError, match="too large"):
        quantize_kv(kv, 8)


def kv_of(
    tokens: int = 40, heads: int = 2, head_dim: int = 64, layers: int = 3, dtype: torch.dtype = torch.float32
) -> PastKVType:
    return tuple(
        (
            random_tensor((1, heads, tokens, head_dim), dtype, 2 * layer, 1.0, 1.0),
            random_tensor((1, heads, tokens, head_dim), dtype, 2 * layer + 1, 0.5, 0.0),
        )
        for layer in range(layers)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [16, 8, 4, "k8v4"])
def test_kv_comes_back_in_its_own_type_and_shape(bits: Any, dtype: torch.dtype) -> None:
    kv = kv_of(dtype=dtype)
    quantized = quantize_kv(kv, bits)
    back = dequantize_kv(quantized, device="cpu")
    assert (quantized.bits, quantized.original_dtype, len(quantized.layers)) == (bits, dtype, 3)
    for pair, wanted in zip(back, kv, strict=True):
        for got, original in zip(pair, wanted, strict=True):
            assert (got.shape, got.dtype) == (original.shape, dtype)
            error = (got.double() - original.double()).norm() / original.double().norm()
            assert error < {16: 1e-9, 8: 0.02, 4: 0.12, "k8v4": 0.12}[bits]


@pytest.mark.parametrize(("bits", "most"), [(8, 0.55), ("k8v4", 0.43), (4, 0.31)])
def test_whole_chunks_take_as_few_bytes_as_promised(bits: Any, most: float) -> None:
    kv = kv_of(tokens=128, head_dim=64, dtype=torch.float16)
    plain = sum(tensor.nbytes for pair in kv for tensor in pair)
    quantized = quantize_kv(kv, bits)
    assert quantized.memory_bytes() / plain <= most
    kept = sum(
        tensor.untyped_storage().nbytes()
        for layer in quantized.layers
        for side in (layer.key, layer.value)
        if isinstance(side, QuantizedTensor)
        for tensor in side.tensors
    )
    assert kept == quantized.memory_bytes()  # packed for real


@pytest.mark.parametrize("bits", [8, 4, "k8v4"])
@pytest.mark.parametrize("head_dim", [1, 2, 7, 63, 80, 96, 128, 256])
@pytest.mark.parametrize("tokens", [1, 2, 31, 33, 128])
def test_odd_shapes(bits: Any, head_dim: int, tokens: int) -> None:
    kv = kv_of(tokens=tokens, head_dim=head_dim, layers=1)
    back = dequantize_kv(quantize_kv(kv, bits))
    for got, original in zip(back[0], kv[0], strict=True):
        assert (got - original).norm() <= 0.15 * original.norm()
        if tokens == 1:
            torch.testing.assert_close(got, original, rtol=2.0**-11, atol=1e-5)


@pytest.mark.parametrize("bits", [8, 4, "k8v4"])
@pytest.mark.parametrize("number", [0.0, 1.0, -2e37, 1e-40, 1e30])
def test_constant_tensors_and_numbers_of_any_size(bits: Any, number: float) -> None:
    kv = ((torch.full((1, 2, 40, 16), number), torch.full((1, 2, 40, 16), number)),)
    for got in dequantize_kv(quantize_kv(kv, bits))[0]:
        torch.testing.assert_close(got, kv[0][0], rtol=2e-2, atol=1e-41)


@pytest.mark.parametrize("bits", [8, 4, "k8v4"])
def test_a_huge_outlier_ruins_only_what_shares_its_group(bits: Any) -> None:
    kv = kv_of(tokens=128, layers=1)
    kv[0][0][0, 0, 100, 5] = 1e30
    kv[0][1][0, 0, 100, 5] = 1e30
    key, value = dequantize_kv(quantize_kv(kv, bits))[0]
    for got, original in ((key, kv[0][0]), (value, kv[0][1])):
        assert torch.isfinite(got).all()
        assert got[0, 0, 100, 5] == pytest.approx(1e30, rel=0.05)
        other = (got[0, 1] - original[0, 1]).norm() / original[0, 1].norm()
        assert other < 0.12  # another head
    other = (value[0, 0, :64] - kv[0][1][0, 0, :64]).norm() / kv[0][1][0, 0, :64].norm()
    assert other < 1.01  # scaled away beside 1e30, but neither NaN nor larger than it was


@pytest.mark.parametrize("bits", [2, 0, "k4v8", True, None, 8.5, "8"])
def test_other_widths_are_refused(bits: Any) -> None:
    with pytest.raises(InvalidRequestError, match="bits must be"):
        quantize_kv(kv_of(), bits)


def test_what_is_no_kv_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="one \\(key, value\\) pair"):
        quantize_kv(())
    with pytest.raises(InvalidRequestError, match="pair per layer"):
        quantize_kv(((torch.zeros(2, 3), torch.zeros(2, 3)),))
    whole = torch.zeros(1, 1, 4, 8, dtype=torch.int8)
    with pytest.raises(InvalidRequestError, match="floating point"):
        quantize_kv(((whole, whole),))
    empty = torch.zeros(1, 1, 0, 8)
    with pytest.raises(InvalidRequestError, match="nothing to quantize"):
        quantize_kv(((empty, empty),))


def test_quantizing_leaves_the_input_alone() -> None:
    kv = kv_of()
    copies = [tensor.clone() for pair in kv for tensor in pair]
    for bits in (8, 4, "k8v4"):
        quantize_kv(kv, bits)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip((t for p in kv for t in p), copies, strict=True))
