"""KV in 8 or 4 bits: keys per channel, values per token.

Keys are grouped over tokens, because some channels are much louder than others; values are grouped over the
channels of a token. With 4 bits both are rotated first. The first token keeps 16 bits: models put an
attention sink there, whose keys are unlike all others. docs/quantization.md says why. Knows the KV of all
layers, no store and no model; quantized_tensor.py does the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvboost.choices import KVBits, is_width
from kvboost.errors import InvalidRequestError
from kvboost.kv.quantized_tensor import QuantizedTensor, Scheme, dequantize, quantize
from kvboost.models import PastKVType

# Chosen by measurement (docs/quantization.md).
KEYS: dict[int, Scheme] = {
    8: Scheme(8, "channel", 64),
    4: Scheme(4, "channel", 32, hadamard=64),
}
VALUES: dict[int, Scheme] = {
    8: Scheme(8, "token", 64),
    4: Scheme(4, "token", 64, hadamard=16),
}


def schemes(bits: KVBits) -> tuple[Scheme, Scheme] | None:
    """How keys and values are quantized; None = not at all."""
    check_bits(bits)
    if bits == 16:
        return None
    if bits == "k8v4":
        return KEYS[8], VALUES[4]
    return KEYS[bits], VALUES[bits]


def check_bits(bits: object) -> None:
    """Raise unless `bits` is a supported width."""
    if not is_width(bits):
        raise InvalidRequestError(f'bits must be 16, 8, 4 or "k8v4", got {bits!r}')


@dataclass(frozen=True, eq=False)
class QuantizedLayer:
    """Keys and values of one layer, `[1, kv_heads, tokens, head_dim]`; plain tensors with 16 bits."""

    key: QuantizedTensor | torch.Tensor
    value: QuantizedTensor | torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.key.nbytes + self.value.nbytes


@dataclass(frozen=True, eq=False)
class QuantizedKV:
    """KV of all layers, as `quantize_kv` made it."""

    layers: tuple[QuantizedLayer, ...]
    bits: KVBits
    original_dtype: torch.dtype

    def memory_bytes(self) -> int:
        """Bytes of codes, steps, minima and all else that is stored."""
        return sum(layer.nbytes for layer in self.layers)


def quantize_kv(kv: PastKVType, bits: KVBits = 8) -> QuantizedKV:
    """Quantize `[batch, kv_heads, tokens, head_dim]` pairs: keys per channel, values per token.

    `bits` is 8, 4, "k8v4" (8-bit keys, 4-bit values), or 16, which passes the tensors through. The result
    stays on the device of `kv`. KV that is not finite, or close to its type's largest number, raises
    `UnstorableKVError`.
    """
    chosen = schemes(bits)
    if not kv or any(tensor.dim() != 4 for pair in kv for tensor in pair):
        raise InvalidRequestError(
            "kv must be one (key, value) pair per layer, [batch, kv_heads, tokens, head_dim]"
        )
    dtype = kv[0][0].dtype
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise InvalidRequestError(f"kv must have a floating point type of at least 16 bits, got {dtype}")
    if chosen is None:
        return QuantizedKV(tuple(QuantizedLayer(key, value) for key, value in kv), bits, dtype)
    keys, values = chosen
    layers = tuple(QuantizedLayer(quantize(key, keys), quantize(value, values)) for key, value in kv)
    return QuantizedKV(layers, bits, dtype)


def dequantize_kv(qkv: QuantizedKV, device: torch.device | str | None = None) -> PastKVType:
    """`[batch, kv_heads, tokens, head_dim]` pairs in the original dtype, on `device` (None = stay)."""

    def decoded(tensor: QuantizedTensor | torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, torch.Tensor):
            return tensor if device is None else tensor.to(device)
        return dequantize(moved(tensor, device), qkv.original_dtype)

    return tuple((decoded(layer.key), decoded(layer.value)) for layer in qkv.layers)


def moved(tensor: QuantizedTensor, device: torch.device | str | None) -> QuantizedTensor:
    """The same tensor on another device."""
    if device is None:
        return tensor
    parts = (part.to(device, non_blocking=True) for part in tensor.tensors)
    return QuantizedTensor(tensor.scheme, tensor.head_dim, *parts)
