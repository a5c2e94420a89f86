"""The values of a model's parameters and buffers: a checksum over all of them, a probe of a few.

A checksum reads every byte where it lies, and can be taken in slices. A probe looks at the same scattered
values of every tensor each time, which is cheap enough for every request: whoever writes a whole tensor, by
whatever way, changes some of them. `KnownTensors` are those of a model as they were last read; when to take
checksums is `model_state`'s business. Knows tensors, no cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import xxhash

from kvboost.identity.structure import ModelStructure

PROBED_VALUES = 32  # per tensor
_GOLDEN = 0.6180339887498949
_DEVICE_BLOCK = 1 << 24  # elements summed at once on an accelerator


class Checksum:
    """A checksum over all bytes of `tensor`, taken slice by slice."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._bytes = raw_bytes(tensor.detach())
        self._at = 0
        self._hash = xxhash.xxh3_128()
        self._sum = 0

    def advance(self, most_bytes: int) -> int:
        """Take in about `most_bytes` more; returns how many that were: 0 when it is through."""
        left = self._bytes.numel() - self._at
        count = min(max(4, most_bytes // 4 * 4), left)  # whole words but for the end: slices change nothing
        if count <= 0:
            return 0
        part = self._bytes[self._at : self._at + count]
        if _is_on_cpu(part):
            self._hash.update(part.numpy().data)
        else:
            self._sum = (self._sum + _device_sum(part, self._at)) % (1 << 64)
        self._at += count
        return count

    def digest(self) -> bytes:
        """The checksum of what was taken in."""
        if _is_on_cpu(self._bytes):
            return bytes(self._hash.digest())
        return self._sum.to_bytes(8, "little")


def _is_on_cpu(part: torch.Tensor) -> bool:
    return part.device.type == "cpu"


def checksum(tensor: torch.Tensor) -> bytes:
    """The checksum over all bytes of a tensor at once."""
    if tensor.is_meta or tensor.numel() == 0:
        return b""
    whole = Checksum(tensor)
    while whole.advance(_DEVICE_BLOCK * 4):
        pass
    return whole.digest()


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes `[n]` of a tensor: a view where it lies in one piece, else a copy."""
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return tensor.reshape(-1).view(torch.uint8)


def _device_sum(part: torch.Tensor, first_byte: int) -> int:
    """Each word times an odd number that depends on its place: changing any one word changes the sum."""
    even = part.numel() // 4 * 4
    words = part[:even].view(torch.int32).to(torch.int64)
    rest = part[even:].to(torch.int64)
    values = torch.cat([words, rest]) if rest.numel() else words
    place = torch.arange(values.numel(), device=values.device, dtype=torch.int64) + first_byte // 4
    return int((values * ((place * 0x5851F42D4C957F2D + 0x14057B7EF767814F) | 1)).sum().item())


# --- a look at some of them ----------------------------------------------------------------------


class Probe:
    """The same values of every tensor, read again each time. Tensors are known by their number.

    On a CPU it holds views of the tensors' memory until it is made anew; on a GPU it knows their addresses
    only, so whoever reads it must have seen that no tensor has moved.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        groups: dict[np.dtype[Any], list[tuple[int, np.ndarray, np.ndarray]]] = {}
        devices: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
        for number, tensor in enumerate(tensors):
            if not _can_be_probed(tensor):
                continue
            if tensor.device.type == "cpu":
                words = _memory_of(tensor.detach())
                groups.setdefault(words.dtype, []).append((number, words, offsets_of(tensor)))
            else:
                devices.setdefault(tensor.device, []).append((number, tensor.detach()))
        self._views = [_Views(parts) for parts in groups.values()]
        self._devices = [_device_probe(device, of) for device, of in devices.items()]

    @property
    def holds_memory(self) -> bool:
        """Whether it may be read though a tensor has moved."""
        return not self._devices

    def note(self) -> None:
        """Remember what is there now."""
        for each in (*self._views, *self._devices):
            each.note()

    def differs(self) -> bool:
        """Whether anything is not as it was when it was noted."""
        return any(each.differs() for each in (*self._devices, *self._views))

    def changed(self) -> set[int]:
        """The numbers of the tensors that are not as they were."""
        return set().union(*(each.changed() for each in (*self._views, *self._devices)))


class _Views:
    """Values of tensors on the CPU that have one size."""

    def __init__(self, parts: list[tuple[int, np.ndarray, np.ndarray]]) -> None:
        """`parts` are the number of a tensor, its memory, and the places in it."""
        self._parts = parts
        self._found = np.empty(sum(len(places) for _, _, places in parts), parts[0][1].dtype)
        self._seen = b""

    def _read(self) -> bytes:
        at, found = 0, self._found
        for _, memory, places in self._parts:
            memory.take(places, out=found[at : at + len(places)], mode="clip")
            at += len(places)
        return found.tobytes()

    def note(self) -> None:
        self._seen = self._read()

    def differs(self) -> bool:
        return self._read() != self._seen

    def changed(self) -> set[int]:
        now, before = self._read(), self._seen
        size, at, numbers = self._found.itemsize, 0, set()
        for number, _, places in self._parts:
            end = at + len(places) * size
            if now[at:end] != before[at:end]:
                numbers.add(number)
            at = end
        return numbers


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _memory_of(tensor: torch.Tensor) -> np.ndarray:
    """The memory of a tensor on the CPU, from its first value to its last, as integers of that size."""
    whole = tensor if tensor.is_contiguous() else tensor.as_strided((span_of(tensor),), (1,))
    memory: np.ndarray = whole.reshape(-1).view(_INTEGERS[tensor.element_size()]).numpy()
    return memory


def span_of(tensor: torch.Tensor) -> int:
    """How many values lie between the first and the last of a tensor, with both."""
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def offsets_of(tensor: torch.Tensor) -> np.ndarray:
    """Where the probed values of a tensor lie, counted in values from its first one."""
    places = probed_places(tensor.numel())
    if tensor.is_contiguous():
        return places
    where = np.unravel_index(places, tuple(tensor.shape))
    return np.asarray(sum(index * step for index, step in zip(where, tensor.stride(), strict=True)))


def probed_places(values: int) -> np.ndarray:
    """Which of so many values are looked at: the ends, and some in between that follow no row or column."""
    if values <= PROBED_VALUES:
        return np.arange(values)
    between = (np.arange(1, PROBED_VALUES - 1) * _GOLDEN) % 1.0 * values
    return np.unique(np.concatenate([[0], between.astype(np.int64), [values - 1]]))


def _can_be_probed(tensor: torch.Tensor) -> bool:
    """Whether its values lie in memory as plain numbers."""
    kind = type(tensor)
    plain = kind in (torch.Tensor, torch.nn.Parameter) or kind.__module__.startswith("torch.nn")
    if not plain or tensor.is_meta or tensor.numel() == 0 or tensor.layout is not torch.strided:
        return False
    return tensor.element_size() in _INTEGERS and all(step >= 0 for step in tensor.stride())


class _GatheringProbe:
    """Words of tensors on an accelerator, gathered by torch's own operators."""

    def __init__(self, tensors: Sequence[tuple[int, torch.Tensor]]) -> None:
        self._numbers = [number for number, _ in tensors]
        self._tensors = [tensor for _, tensor in tensors]
        self._seen: list[bytes] = []

    def _read(self) -> list[bytes]:
        parts = []
        for tensor in self._tensors:
            raw = raw_bytes(tensor)
            step = max(1, raw.numel() // (4 * PROBED_VALUES)) | 1
            parts.append(raw[::step][: 4 * PROBED_VALUES])
        sizes = [len(part) for part in parts]
        gathered = torch.cat(parts).cpu().numpy().tobytes()
        ends = np.cumsum([0, *sizes]).tolist()
        return [gathered[start:end] for start, end in pairwise(ends)]

    def note(self) -> None:
        self._seen = self._read()

    def differs(self) -> bool:
        return self._read() != self._seen

    def changed(self) -> set[int]:
        now = self._read()
        return {
            number
            for number, before, after in zip(self._numbers, self._seen, now, strict=True)
            if before != after
        }


def _device_probe(device: torch.device, tensors: Sequence[tuple[int, torch.Tensor]]) -> Any:
    if device.type == "cuda":
        from kvboost.identity import cuda_probe

        if cuda_probe.is_available():
            return cuda_probe.CudaProbe(device, tensors, offsets_of)
    return _GatheringProbe(tensors)


# --- as they were last read ----------------------------------------------------------------------


class KnownTensors:
    """A model's tensors as they were at the last reading, each once.

    Holds names, version counters, addresses, checksums and a probe of the values.
    """

    def __init__(self, structure: ModelStructure, present: list[torch.Tensor | None]) -> None:
        self.ids = list(map(id, present))
        picks: dict[int, int] = {}
        for number, tensor in enumerate(present):
            if tensor is not None and number not in structure.skipped:
                picks.setdefault(id(tensor), number)
        self._picks = list(picks.values())
        self.numbers = {key: number for number, key in enumerate(picks)}  # by id
        tensors = self.tensors(present)
        self.names = [structure.tensor_names[number] for number in self._picks]
        self.versions, self.places = versions_of(tensors), places_of(tensors)
        self.kinds = [f"{tensor.dtype}|{tuple(tensor.shape)}|{tensor.device.type}" for tensor in tensors]
        self.probe = Probe(tensors)
        self.probe.note()
        self.checksums: list[bytes] = []
        self.device_types = {"cpu", *(tensor.device.type for tensor in tensors if not tensor.is_meta)}
        self.is_elsewhere = any(tensor.is_meta for tensor in tensors)  # their values are not known
        self.nbytes = sum(tensor.nbytes for tensor in tensors if not tensor.is_meta)

    def tensors(self, present: list[torch.Tensor | None]) -> list[torch.Tensor]:
        """Those of `present` that are looked at; it must hold the same tensors as at the last reading."""
        return [present[number] for number in self._picks]  # type: ignore[misc]  # None is never picked

    def is_same(self, present: list[torch.Tensor | None]) -> bool:
        """Whether no tensor was replaced, moved, or written to in a way that torch counts."""
        if list(map(id, present)) != self.ids:
            return False
        tensors = self.tensors(present)
        return versions_of(tensors) == self.versions and places_of(tensors) == self.places


def versions_of(tensors: list[torch.Tensor]) -> list[int]:
    """The version counters that torch moves with each write it sees."""
    try:
        return [each._version for each in tensors]
    except RuntimeError:  # inference tensors have none
        return [0 if each.is_inference() else each._version for each in tensors]


def places_of(tensors: list[torch.Tensor]) -> list[int]:
    """Where their memory begins."""
    try:
        return [each.data_ptr() for each in tensors]
    except RuntimeError:
        return [place_of(each) for each in tensors]


def place_of(tensor: torch.Tensor) -> int:
    """Where its memory begins; 0 if it has none of its own."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0
