"""The stored form of a chunk's KV: as computed, or quantized; its size, and its way into an arena.

A codec belongs to one layout and one width. It encodes raw buffers `[heads, tokens, head_dim]` into tensors
to keep, and decodes these, piece by piece, into an arena. What is kept is a flat tuple of tensors whose
shapes follow from the number of tokens, so that files and checksums need to know no more. Knows no store
and no tokens.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from kvboost.choices import KVBits
from kvboost.kernels import copying, dequantizing
from kvboost.kernels.copying import Run
from kvboost.kernels.fallback import launched
from kvboost.kv.arena import Arena, own_copy
from kvboost.kv.device_tier import DeviceTier
from kvboost.kv.layout import HeadBlock, KVLayout, Packed, head_blocks
from kvboost.kv.offload import Arrival, offloader_of
from kvboost.kv.pinned import POOL, pinned_copy
from kvboost.kv.quantize import schemes
from kvboost.kv.quantized_tensor import (
    QuantizedTensor,
    Scheme,
    dequantize_into,
    form_of,
    quantize,
    rotation_of,
)
from kvboost.models import CachedChunk, CompositeChunk, PastKVType

_Section = tuple[tuple[int, ...], torch.dtype]
_ALIGNMENT = 8  # bytes; every section of a buffer starts at a multiple of it


@dataclass(frozen=True)
class _Part:
    """Heads of one slab that are quantized alike."""

    block: HeadBlock
    scheme: Scheme
    head_dim: int

    def sections(self, tokens: int) -> tuple[_Section, ...]:
        """Shape and type of its codes, steps, minima, exponents and first tokens."""
        lead = (len(self.block.firsts), self.block.heads_per_layer)
        steps = self.scheme.steps_shape(tokens, self.head_dim)
        return (
            ((*lead, tokens, self.scheme.code_bytes(self.head_dim)), torch.uint8),
            ((*lead, *steps), torch.float16),
            ((*lead, *steps), torch.float16),
            ((*lead, 1, 1), torch.int16),
            ((*lead, 1, self.head_dim), torch.float16),
        )

    def nbytes(self, tokens: int) -> int:
        return sum(_padded_bytes(section) for section in self.sections(tokens))

    def views(self, buffer: torch.Tensor, at: int, tokens: int) -> QuantizedTensor:
        """Its tensors as views of `buffer`, uint8 `[bytes]`, from byte `at` on."""
        views = []
        for shape, dtype in self.sections(tokens):
            size = math.prod(shape) * dtype.itemsize
            views.append(buffer[at : at + size].view(dtype).view(shape))
            at += _padded_bytes((shape, dtype))
        return QuantizedTensor(self.scheme, self.head_dim, *views)


def _padded_bytes(section: _Section) -> int:
    shape, dtype = section
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


class KVCodec:
    """How chunks of one layout are kept: as they are (16 bits), or quantized into one buffer per slab."""

    def __init__(
        self,
        layout: KVLayout,
        bits: KVBits = 16,
        device: torch.device | None = None,
        tier: DeviceTier | None = None,
    ) -> None:
        """What is kept lies on `device`; None = where it was computed. A `tier` has copies of some of it."""
        self.layout = layout
        self.device = device
        self.tier = tier
        self.bits: KVBits = bits
        self._parts: tuple[tuple[_Part, ...], ...] | None = None  # by slab
        for spec in layout.slabs if device is not None and device.type == "cpu" else ():
            if spec.device.type == "cuda":
                POOL.serve(spec.device)
        if (chosen := schemes(bits)) is not None:
            parts = [
                _Part(block, scheme, layout.slabs[block.slab].head_dim)
                for side, scheme in enumerate(chosen)
                for block in head_blocks(pair[side] for pair in layout.layers)
            ]
            self._parts = tuple(
                tuple(part for part in parts if part.block.slab == slab) for slab in range(len(layout.slabs))
            )

    @property
    def is_lossy(self) -> bool:
        return self._parts is not None

    def keeps_form_of(self, other: KVCodec) -> bool:
        """Whether two codecs keep the same bytes, wherever they lie."""
        return self is other or (
            self.bits == other.bits
            and self.layout.layers == other.layout.layers
            and [(s.dtype, s.heads, s.head_dim) for s in self.layout.slabs]
            == [(s.dtype, s.heads, s.head_dim) for s in other.layout.slabs]
        )

    @property
    def form(self) -> str:
        """The same for codecs that keep the same bytes, in every process."""
        slabs = [(str(s.dtype), s.heads, s.head_dim) for s in self.layout.slabs]
        return hashlib.sha256(repr((self.bits, slabs, self.layout.layers)).encode()).hexdigest()[:16]

    def bytes_for(self, tokens: int) -> int:
        """All bytes that are kept of `tokens` tokens."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.specs(tokens))

    def specs(self, tokens: int) -> tuple[_Section, ...]:
        """Shape and type of every tensor that is kept of `tokens` tokens."""
        if self._parts is None:
            return tuple(((spec.heads, tokens, spec.head_dim), spec.dtype) for spec in self.layout.slabs)
        if tokens == 0:
            return tuple(((0,), torch.uint8) for _ in self._parts)
        return tuple(((sum(part.nbytes(tokens) for part in parts),), torch.uint8) for parts in self._parts)

    def encode(self, raw: Packed) -> StoredKV:
        """Copy buffers or views `[heads, tokens, head_dim]` into the form in which they are kept.

        Raises `UnstorableKVError` where the encoding cannot hold them.
        """
        tokens = raw[0].shape[1]
        if self._parts is None:
            return self._kept(raw, tokens)
        buffers = []
        for (shape, dtype), parts, slab in zip(self.specs(tokens), self._parts, raw, strict=True):
            buffer = torch.zeros(shape, dtype=dtype, device=slab.device)
            for part, target in _placed(parts, buffer, tokens):
                made = quantize(part.block.of(slab), part.scheme)
                for view, tensor in zip(target.tensors, made.tensors, strict=True):
                    view.copy_(tensor)
            buffers.append(buffer)
        if self.device is None or all(each.device == self.device for each in buffers):
            return StoredKV(self, tuple(buffers), tokens)
        return self._kept(buffers, tokens)

    def _kept(self, tensors: Sequence[torch.Tensor], tokens: int) -> StoredKV:
        """Copies where this codec keeps them; from a GPU to the host they may still be on their way."""
        copies: list[torch.Tensor] = []
        arrivals: list[Arrival] = []
        for each in tensors:
            home = self.device or each.device
            if home.type == "cpu" and each.is_cuda:
                copy, arrival = offloader_of(each.device).copy(each)
                arrivals += [arrival] if arrival is not None else []
            else:
                copy = own_copy(each, home)
            copies.append(copy)
        stored = StoredKV(self, tuple(copies), tokens, tuple(arrivals))
        if self.tier is not None and arrivals:
            self.tier.begin_round()
            self.tier.keep(stored, tensors)
        return stored

    def settled(self, tensors: Packed) -> Packed:
        """Tensors from a file, moved to where this codec keeps them: on a device, or pinned next to a GPU."""
        homes = [spec.device if self.device is None else self.device for spec in self.layout.slabs]
        near_gpu = [spec.device.type == "cuda" for spec in self.layout.slabs]
        return tuple(
            pinned_copy(tensor) if home.type == "cpu" and pin else tensor.to(home)
            for tensor, home, pin in zip(tensors, homes, near_gpu, strict=True)
        )

    def numbers(self, kept: Packed, tokens: int) -> Iterator[torch.Tensor]:
        """The numbers in what was kept: KV itself, or what codes are scaled by and added to."""
        if self._parts is None:
            yield from kept
            return
        for buffer, parts in zip(kept, self._parts, strict=True):
            for _, quantized in _placed(parts, buffer, tokens):
                yield from (each for each in quantized.tensors if each.dtype.is_floating_point)

    def decode_into(
        self, kept: Packed, tokens: int, slabs: Sequence[torch.Tensor], start: int, offset: int, end: int
    ) -> None:
        """Write the tokens `[offset, end)` of what was kept to slots from `start` on.

        `slabs` are `[heads, slots, head_dim]`.
        """
        if end <= offset:
            return
        if self._parts is None:
            for slab, buffer in zip(slabs, kept, strict=True):
                slab[:, start : start + end - offset].copy_(buffer[:, offset:end], non_blocking=True)
            return
        for slab, buffer, parts in zip(slabs, kept, self._parts, strict=True):
            near = buffer.to(slab.device, non_blocking=True)
            for part, quantized in _placed(parts, near, tokens):
                out = part.block.of(slab[:, start : start + end - offset])
                dequantize_into(quantized, out, offset)

    def decode_all(
        self, placements: Sequence[tuple[Packed, Placement]], slabs: Sequence[torch.Tensor]
    ) -> None:
        """Write pieces of quantized chunks to their slots, one launch for all heads that are kept alike.

        Every placement comes with what its chunk keeps, on the device of `slabs` `[heads, slots, head_dim]`.
        """
        assert self._parts is not None
        where = np.array(
            [(kv.tokens, offset, end - offset, start) for _, (kv, start, offset, end) in placements],
            dtype=np.int64,
        )
        lengths, kind = np.unique(where[:, 0], return_inverse=True)
        for number, (slab, parts) in enumerate(zip(slabs, self._parts, strict=True)):
            bases = np.array([kept[number].data_ptr() for kept, _ in placements], dtype=np.int64)
            offsets = np.array([_offsets(parts, tokens) for tokens in lengths.tolist()], dtype=np.int64)
            for index, part in enumerate(parts):
                block, form = part.block, form_of(part.scheme, part.head_dim)
                rows = [first + head for first in block.firsts for head in range(block.heads_per_layer)]
                rotation = rotation_of(part.scheme, part.head_dim, slab.device)
                runs = np.concatenate([bases[:, None] + offsets[kind, index], where], axis=1)
                dequantizing.dequantize_runs(slab, rows, runs, form, rotation)


@lru_cache(maxsize=256)
def _offsets(parts: tuple[_Part, ...], tokens: int) -> list[list[int]]:
    """For every part, the first byte of each of its sections in a buffer of so many tokens."""
    found, at = [], 0
    for part in parts:
        sizes = [_padded_bytes(section) for section in part.sections(tokens)]
        found.append([at + sum(sizes[:number]) for number in range(len(sizes))])
        at += sum(sizes)
    return found


def _placed(
    parts: Sequence[_Part], buffer: torch.Tensor, tokens: int
) -> Iterator[tuple[_Part, QuantizedTensor]]:
    """Every part with its views of `buffer`."""
    at = 0
    for part in parts:
        if tokens:
            yield part, part.views(buffer, at, tokens)
        at += part.nbytes(tokens)


@dataclass(frozen=True, eq=False)
class StoredKV:
    """KV of `tokens` tokens as `codec` keeps it. Without tensors it lies on disk, and is loaded first.

    Until their `arrivals` the tensors are still on their way from a GPU: `tensors` waits for that.
    """

    codec: KVCodec
    kept: Packed
    tokens: int
    arrivals: tuple[Arrival, ...] = ()

    @property
    def tensors(self) -> Packed:
        """What is kept, for the host to read."""
        for each in self.arrivals:
            each.wait()
        return self.kept

    def near(self, devices: Iterable[torch.device]) -> Packed:
        """What is kept, for `devices` to read next: copies that lie there, or what is in their reach."""
        devices, tier = set(devices), self.codec.tier
        found = tier.found(self) if tier is not None and devices == {tier.device} else None
        if found is not None:
            return found
        for arrival in self.arrivals:
            for device in devices:
                arrival.order(device)
        if tier is not None and devices == {tier.device}:
            found = tier.keep(self, self.kept)
        return found or self.kept

    @property
    def is_loaded(self) -> bool:
        return bool(self.kept)

    @cached_property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.kept)

    def without_tensors(self) -> StoredKV:
        """The same chunk once its tensors are dropped."""
        return StoredKV(self.codec, (), self.tokens)

    @cached_property
    def is_reachable(self) -> bool:
        """Whether a GPU can copy it together with others from where it is kept."""
        return all(
            copying.is_reachable(tensor) and (tensor.is_cuda or POOL.owns(tensor)) for tensor in self.kept
        )

    def place(self, arena: Arena, start: int, offset: int, end: int) -> None:
        """Write its tokens `[offset, end)` to slots from `start` on, in every sequence."""
        near = self.near(slab.device for slab in arena.slabs)
        self.codec.decode_into(near, self.tokens, [slab[0] for slab in arena.slabs], start, offset, end)
        stop = start + end - offset
        for slab in arena.slabs if arena.batch > 1 else ():
            slab[1:, :, start:stop] = slab[:1, :, start:stop]

    def decoded(self, count: int | None = None) -> Packed:
        """The first `count` tokens (None = all) as buffers `[heads, tokens, head_dim]`."""
        count = self.tokens if count is None else count
        if not self.codec.is_lossy:
            return tuple(part[:, :count] for part in self.tensors)
        out = tuple(
            torch.empty(spec.heads, count, spec.head_dim, dtype=spec.dtype, device=tensor.device)
            for spec, tensor in zip(self.codec.layout.slabs, self.tensors, strict=True)
        )
        self.codec.decode_into(self.tensors, self.tokens, out, 0, 0, count)
        return out

    def past_key_values(self) -> PastKVType:
        """`[1, kv_heads, tokens, head_dim]` per layer: views where nothing is quantized."""
        return self.codec.layout.unpack(self.decoded())


class Placement(NamedTuple):
    """Tokens `[offset, end)` of stored KV, and the slot of the first of them."""

    kv: StoredKV
    start: int
    offset: int
    end: int


def place_all(placements: Iterable[Placement], arena: Arena) -> None:
    """Write stored KV to slots of an arena that do not overlap; on a GPU in one launch, where it can."""
    devices = {slab.device for slab in arena.slabs}
    slabs = [slab[0] for slab in arena.slabs]
    at_once = arena.batch == 1 and all(map(copying.takes_runs, slabs))
    decodes = arena.batch == 1 and all(dequantizing.can_dequantize(slab, slab.shape[2]) for slab in slabs)
    runs: list[list[Run]] = [[] for _ in slabs]
    rounds: set[DeviceTier] = set()
    quantized: dict[KVCodec, list[tuple[Packed, Placement]]] = {}
    for each in placements:
        kv, start, offset, end = each
        if end <= offset:
            continue
        if (tier := kv.codec.tier) is not None and tier not in rounds:
            rounds.add(tier)
            tier.begin_round()
        if not (decodes if kv.codec.is_lossy else at_once):
            kv.place(arena, start, offset, end)
            continue
        near = kv.near(devices)
        if kv.codec.is_lossy:
            there = tuple(
                part.to(slab.device, non_blocking=True) for part, slab in zip(near, slabs, strict=True)
            )
            quantized.setdefault(kv.codec, []).append((there, each))
        elif near is kv.kept and not kv.is_reachable:
            kv.place(arena, start, offset, end)
        else:
            for taken, tensor in zip(runs, near, strict=True):
                taken.append(Run(tensor, offset, end - offset, start))
    for slab, taken in zip(slabs, runs, strict=True):
        if taken:
            copying.copy_in(slab, taken)
    for codec, pieces in quantized.items():
        if not launched("quantized KV", partial(codec.decode_all, pieces, slabs)):
            for _, (kv, start, offset, end) in pieces:
                kv.place(arena, start, offset, end)


class KeptChunk(CachedChunk):
    """A chunk of the store: `past_key_values` are unpacked or decoded from `kv` each time they are read.

    With a `composite` it holds only the positions that the composite calls its own.
    """

    def __init__(self, kv: StoredKV, *, composite: CompositeChunk | None = None, **fields: Any) -> None:
        self.kv = kv
        self.composite = composite
        self.fetched_ms: float | None = None  # how long it took to come from another machine
        super().__init__(past_key_values=(), **fields)

    @property
    def past_key_values(self) -> PastKVType:
        return self.kv.past_key_values()

    @past_key_values.setter
    def past_key_values(self, _given: PastKVType) -> None:
        """Ignored: what the chunk holds is `kv`."""

    @property
    def is_news(self) -> bool:
        """Whether it came from another machine, and one request at most has used it."""
        return self.fetched_ms is not None and self.access_count <= 1

    def with_kv(self, kv: StoredKV) -> KeptChunk:
        """The same chunk with other KV."""
        other = copy.copy(self)
        other.kv = kv
        return other

    def memory_bytes(self) -> int:
        """Bytes of all its tensors, as they are kept."""
        return self.kv.nbytes
