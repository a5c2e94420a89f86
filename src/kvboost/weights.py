"""The values of a model's parameters and buffers: a checksum over all of them, a probe of a few.

A checksum reads every byte where it lies, and can be taken in slices. A probe looks at the same scattered
words of every tensor each time, which is cheap enough for every request: whoever writes a whole tensor, by
whatever way, changes some of them. Knows tensors, no model and no cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import xxhash

PROBED_WORDS = 32  # of 4 bytes, per tensor
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
        """Take in up to `most_bytes` more; returns how many that were: 0 when it is through."""
        count = min(most_bytes, self._bytes.numel() - self._at)
        if count <= 0:
            return 0
        part = self._bytes[self._at : self._at + count]
        if part.device.type == "cpu":
            self._hash.update(part.numpy().data)
        else:
            self._sum = (self._sum + _device_sum(part, self._at)) % (1 << 64)
        self._at += count
        return count

    def digest(self) -> bytes:
        """The checksum of what was taken in."""
        if self._bytes.device.type == "cpu":
            return bytes(self._hash.digest())
        return self._sum.to_bytes(8, "little")


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
    place = torch.arange(values.numel(), device=values.device, dtype=torch.int64) + first_byte
    return int((values * ((place * 0x5851F42D4C957F2D + 0x14057B7EF767814F) | 1)).sum().item())


# --- a look at some of them ----------------------------------------------------------------------


class Probe:
    """The same words of every tensor, read again each time. Tensors are known by their number.

    On a CPU it holds views of the tensors' memory until it is made anew; on a GPU it knows their addresses
    only, so whoever reads it must have seen that no tensor has moved.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._views: list[tuple[int, np.ndarray, np.ndarray]] = []  # number, words, places
        devices: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
        for number, tensor in enumerate(tensors):
            if not _can_be_probed(tensor):
                continue
            if tensor.device.type == "cpu":
                words = _as_words(raw_bytes(tensor.detach()).numpy())
                self._views.append((number, words, probed_places(len(words))))
            else:
                devices.setdefault(tensor.device, []).append((number, tensor.detach()))
        self._size = sum(len(places) for _, _, places in self._views)
        self._words = np.empty(self._size, dtype=np.uint32)
        self._devices = [_device_probe(device, of) for device, of in devices.items()]
        self._seen = b""
        self._slices = self._slices_of_views()

    def _slices_of_views(self) -> list[tuple[int, slice]]:
        ends = np.cumsum([0, *(len(places) for _, _, places in self._views)]).tolist()
        return [
            (number, slice(start, end))
            for (number, _, _), start, end in zip(self._views, ends[:-1], ends[1:], strict=True)
        ]

    @property
    def holds_memory(self) -> bool:
        """Whether it may be read though a tensor has moved."""
        return not self._devices

    def note(self) -> None:
        """Remember what is there now."""
        self._seen = self._read_views()
        for each in self._devices:
            each.note()

    def differs(self) -> bool:
        """Whether anything is not as it was when it was noted."""
        changed = [each.differs() for each in self._devices]
        return self._read_views() != self._seen or any(changed)

    def changed(self) -> set[int]:
        """The numbers of the tensors that are not as they were."""
        before = np.frombuffer(self._seen, dtype=np.uint32)
        now = np.frombuffer(self._read_views(), dtype=np.uint32)
        found = {number for number, part in self._slices if (before[part] != now[part]).any()}
        return found.union(*(each.changed() for each in self._devices))

    def _read_views(self) -> bytes:
        at = 0
        for _, words, places in self._views:
            words.take(places, out=self._words[at : at + len(places)], mode="clip")
            at += len(places)
        return self._words.tobytes()


def probed_places(words: int) -> np.ndarray:
    """Which of so many words are looked at: the ends, and some in between that follow no row or column."""
    if words <= PROBED_WORDS:
        return np.arange(words)
    between = (np.arange(1, PROBED_WORDS - 1) * _GOLDEN) % 1.0 * words
    return np.unique(np.concatenate([[0], between.astype(np.int64), [words - 1]]))


def _as_words(raw: np.ndarray) -> np.ndarray:
    return raw.view(np.uint32) if len(raw) % 4 == 0 else raw.astype(np.uint32) if len(raw) < 4 else _cut(raw)


def _cut(raw: np.ndarray) -> np.ndarray:
    """Whole words only: the last bytes of an odd number of them are not looked at."""
    return raw[: len(raw) // 4 * 4].view(np.uint32)


def _can_be_probed(tensor: torch.Tensor) -> bool:
    """Whether its values lie in memory as plain numbers, in one piece."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) or type(tensor).__module__.startswith(
        "torch.nn"
    )
    return plain and not tensor.is_meta and tensor.numel() > 0 and tensor.is_contiguous()


class _GatheringProbe:
    """Words of tensors on an accelerator, gathered by torch's own operators."""

    def __init__(self, device: torch.device, tensors: Sequence[tuple[int, torch.Tensor]]) -> None:
        self._device = device
        self._numbers = [number for number, _ in tensors]
        self._tensors = [tensor for _, tensor in tensors]
        self._seen: list[bytes] = []

    def _read(self) -> list[bytes]:
        parts = []
        for tensor in self._tensors:
            raw = raw_bytes(tensor)
            step = max(1, raw.numel() // (4 * PROBED_WORDS)) | 1
            parts.append(raw[::step][: 4 * PROBED_WORDS])
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
        from kvboost import cuda_probe

        if cuda_probe.is_available():
            return cuda_probe.CudaProbe(device, tensors, probed_places)
    return _GatheringProbe(device, tensors)
