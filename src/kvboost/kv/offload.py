"""The way out of a GPU: KV is copied to pinned memory of the host while the GPU computes on.

What is to be copied is first set aside on the device, in a ring, in the order of the stream that computed it:
from then on its slots may be written to. A stream of its own brings it to the host. Nobody waits for that but
who reads the copy. Knows tensors and streams, no chunks.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

import torch

from kvboost.kv.pinned import POOL, pinned_copy
from kvboost.locks import fork_safe_lock

_RING_BYTES = 128 << 20
_ALIGNMENT = 256


class Arrival:
    """When a copy is there."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event: torch.cuda.Event | None = event

    def wait(self) -> None:
        """Wait until the host can read it."""
        event = self._event
        if event is not None:
            event.synchronize()
            self._event = None

    def order(self, device: torch.device) -> None:
        """Have what the device is told next wait for it; the host goes on."""
        event = self._event
        if event is None:
            return
        if _has_happened(event):
            self._event = None
        elif device.type == "cuda":
            torch.cuda.current_stream(device).wait_event(event)
        else:
            self.wait()


def _has_happened(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]


class _Set(NamedTuple):
    """Bytes `[start, end)` of the ring, in use until `left` has happened."""

    start: int
    end: int
    left: torch.cuda.Event


class Offloader:
    """Copies tensors of one GPU to the host. Its ring takes device memory from the first copy on."""

    def __init__(self, device: torch.device, ring_bytes: int = _RING_BYTES) -> None:
        self._device = device
        self._ring_bytes = ring_bytes
        self._ring: torch.Tensor | None = None
        self._stream: torch.cuda.Stream | None = None
        self._used: deque[_Set] = deque()  # oldest first
        self._at = 0
        self._lock = fork_safe_lock()

    @property
    def nbytes(self) -> int:
        """Device memory of the ring."""
        return self._ring_bytes if self._ring is not None else 0

    def copy(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Arrival | None]:
        """A contiguous copy of `tensor` on the host, and when it is there; None where it is already."""
        size = math.prod(tensor.shape) * tensor.itemsize
        room = -(-size // _ALIGNMENT) * _ALIGNMENT
        if not size or room > self._ring_bytes:
            return pinned_copy(tensor), None
        host = POOL.empty(tuple(tensor.shape), tensor.dtype)
        with self._lock, torch.cuda.device(self._device), torch.inference_mode(False):
            try:
                return host, self._send(tensor, host, size, room)
            except torch.cuda.OutOfMemoryError:  # no memory for the ring
                return host.copy_(tensor), None

    def _send(self, tensor: torch.Tensor, host: torch.Tensor, size: int, room: int) -> Arrival:
        computing = torch.cuda.current_stream(self._device)
        if self._ring is None or self._stream is None:
            self._ring = torch.empty(self._ring_bytes, dtype=torch.uint8, device=self._device)
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        start = self._at if self._at + room <= self._ring_bytes else 0
        self._make_room(computing, start, start + room)
        staged = self._ring[start : start + size].view(tensor.dtype).view(tensor.shape)
        staged.copy_(tensor.detach())
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            host.copy_(staged, non_blocking=True)
            left = torch.cuda.Event()  # type: ignore[no-untyped-call]
            left.record(self._stream)
        self._used.append(_Set(start, start + room, left))
        self._at = start + room
        return Arrival(left)

    def _make_room(self, computing: torch.cuda.Stream, start: int, end: int) -> None:
        """Have the computing stream wait until nothing of `[start, end)` is on its way."""
        while self._used and _has_happened(self._used[0].left):
            self._used.popleft()
        for each in self._used:
            if each.start < end and start < each.end:
                computing.wait_event(each.left)


_OFFLOADERS: dict[torch.device, Offloader] = {}


def offloader_of(device: torch.device) -> Offloader:
    """The one of a GPU."""
    return _OFFLOADERS.setdefault(device, Offloader(device))


def ring_bytes() -> int:
    """Device memory of all rings."""
    return sum(each.nbytes for each in _OFFLOADERS.values())
