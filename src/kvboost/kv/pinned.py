"""Pinned memory of the host, taken from large regions that are made before they are needed.

Pinning costs more than copying: page by page, and whoever asks for it waits. So regions of huge pages are
made in the background, ahead of what is used, and tensors are pieces of them. What a tensor held is used
again once it is gone. Knows no KV and no GPU but the calls that pin.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import mmap
import threading
import weakref
from bisect import insort
from collections import deque
from typing import Any, Protocol

import psutil
import torch

from kvboost.locks import fork_safe_lock

_log = logging.getLogger(__name__)
_REGION_BYTES = 256 << 20
_MOST_AHEAD = 8  # regions that are made before they are needed, as long as they are
_AHEAD_SHARE = 64  # of the machine's memory, one part
_ALIGNMENT = 256
_PORTABLE = 1  # pinned for every GPU


class Pinning(Protocol):
    """How memory is pinned."""

    def serves(self, device: torch.device) -> None:
        """A device will read and write it."""

    def pin(self, address: int, nbytes: int) -> None:
        """Pin it. Raises OSError where the system does not let us."""

    def unpin(self, address: int) -> None:
        """The opposite; nothing on the device reads it any more."""

    def finish(self) -> None:
        """Wait until nothing that was asked of the devices before is still under way."""


def _cudart() -> Any:
    """CUDA's runtime, as torch has it."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class _CudaPinning:
    def __init__(self) -> None:
        self._devices: set[torch.device] = set()

    def serves(self, device: torch.device) -> None:
        self._devices.add(device)

    def pin(self, address: int, nbytes: int) -> None:
        with torch.cuda.device(min(self._devices, key=str, default=None)):
            status = int(_cudart().cudaHostRegister(address, nbytes, _PORTABLE))
        if status:
            raise OSError(f"cudaHostRegister failed with error {status}")

    def unpin(self, address: int) -> None:
        _cudart().cudaHostUnregister(address)

    def finish(self) -> None:
        for device in list(self._devices):
            torch.cuda.synchronize(device)


class _Region:
    """Pinned memory, and which parts `(start, end)` of it are free, in order."""

    def __init__(self, nbytes: int, pinning: Pinning) -> None:
        self.nbytes = nbytes
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        self.memory = mmap.mmap(-1, nbytes, **private)
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # a child has no use for it, and copying costs
            with contextlib.suppress(AttributeError, OSError):  # not every system knows them
                self.memory.madvise(getattr(mmap, advice))
        touched = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.address = touched.data_ptr()
        touched.zero_()  # pages are there before they are pinned: by all cores, and without the GIL
        pinning.pin(self.address, nbytes)
        self.free = [(0, nbytes)]

    @property
    def is_unused(self) -> bool:
        return self.free == [(0, self.nbytes)]

    def take(self, nbytes: int) -> int | None:
        """Where `nbytes` begin that are the caller's now; None where no part is large enough."""
        for index, (start, end) in enumerate(self.free):
            if end - start >= nbytes:
                self.free[index : index + 1] = [(start + nbytes, end)] if end - start > nbytes else []
                return start
        return None

    def give_back(self, start: int, end: int) -> None:
        """Take back a part and join it with its neighbours."""
        insort(self.free, (start, end))
        joined: list[tuple[int, int]] = []
        for first, last in self.free:
            if joined and joined[-1][1] == first:
                joined[-1] = (joined[-1][0], last)
            else:
                joined.append((first, last))
        self.free = joined


class PinnedPool:
    """Tensors in pinned memory; where the system does not let us pin, in memory that torch pins itself."""

    def __init__(self, pinning: Pinning | None = None, region_bytes: int = _REGION_BYTES) -> None:
        self._pinning = pinning or _CudaPinning()
        self._region_bytes = region_bytes
        self._regions: list[_Region] = []
        self._gone: deque[tuple[_Region, int, int]] = deque()  # of tensors that are no more, not seen yet
        self._lock = fork_safe_lock(around_data=True)
        self._growing = fork_safe_lock()
        self._making: threading.Thread | None = None
        self._has_users = False  # since the last trim
        self._refusal = ""
        share = psutil.virtual_memory().total // _AHEAD_SHARE // region_bytes
        self._ahead_bytes = max(1, min(_MOST_AHEAD, share)) * region_bytes

    @property
    def nbytes(self) -> int:
        """All memory that is pinned."""
        return sum(region.nbytes for region in list(self._regions))

    @property
    def free_bytes(self) -> int:
        """What of it no tensor has."""
        regions = list(self._regions)
        return self._gone_bytes() + sum(end - start for region in regions for start, end in region.free)

    def _gone_bytes(self) -> int:
        try:
            return sum(end - start for _, start, end in self._gone)
        except RuntimeError:  # a tensor went meanwhile
            return self._gone_bytes()

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in it: what a device does with it is waited for before it is used again."""
        at = tensor.data_ptr()
        return any(region.address <= at < region.address + region.nbytes for region in list(self._regions))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialized tensor of `shape`."""
        size = math.prod(shape) * dtype.itemsize
        room = -(-size // _ALIGNMENT) * _ALIGNMENT
        taken = (self._take(room) or self._take_from_new(room)) if size else None
        if taken is None:
            with torch.inference_mode(False):
                return torch.empty(shape, dtype=dtype, pin_memory=torch.cuda.is_available())
        region, start = taken
        owner = (ctypes.c_char * size).from_buffer(region.memory, start)
        # Called wherever garbage is collected, so it takes no lock.
        weakref.finalize(owner, self._gone.append, (region, start, start + room)).atexit = False
        self.make_ahead()
        with torch.inference_mode(False):
            return torch.frombuffer(owner, dtype=dtype).view(shape)

    def _take(self, room: int) -> tuple[_Region, int] | None:
        with self._lock:
            taken = self._first_fit(room)
            if taken is None and self._gone:
                self._collect()
                taken = self._first_fit(room)
            return taken

    def _first_fit(self, room: int) -> tuple[_Region, int] | None:
        for region in self._regions:
            start = region.take(room)
            if start is not None:
                return region, start
        return None

    def _collect(self) -> None:
        """Take back what is gone by now, once no device reads or writes it: a copy may be under way."""
        count = len(self._gone)
        self._pinning.finish()
        for _ in range(count):  # and no more: others went later, with copies that nobody waited for
            region, start, end = self._gone.popleft()
            region.give_back(start, end)

    def _take_from_new(self, room: int) -> tuple[_Region, int] | None:
        """From the region that is being made, or from one that is made now."""
        if self._refusal:
            return None
        with self._growing:  # the background makes one at this moment, perhaps
            taken = self._take(room)
            if taken is not None:
                return taken
            # In a thread: an error that CUDA remembers for a thread must not meet the caller later.
            making = threading.Thread(target=self._grow, args=(max(room, self._region_bytes),))
            making.start()
            making.join()
        return self._take(room)

    def _grow(self, nbytes: int) -> None:
        """Make a region. By one thread at a time: pinning goes no faster by two."""
        try:
            region = _Region(nbytes, self._pinning)
        except Exception as error:  # whatever it is, torch has memory too
            self._refusal = str(error) or type(error).__name__
            _log.warning("memory cannot be pinned in advance (%s): storing KV of a GPU takes longer", error)
            return
        with self._lock:
            self._regions.append(region)

    def serve(self, device: torch.device) -> None:
        """A device will use it: see to it, in the background, that some memory is there."""
        self._pinning.serves(device)
        self.make_ahead()

    def make_ahead(self) -> None:
        """See to it, in the background, that some memory is free."""
        self._has_users = True
        if not self._is_short:
            return
        with self._lock:
            if self._making is not None and self._making.is_alive():
                return
            self._making = threading.Thread(target=self._make_all, name="kvboost-pinned", daemon=True)
            self._making.start()

    @property
    def _is_short(self) -> bool:
        return self._has_users and not self._refusal and self.free_bytes < self._ahead_bytes

    def _make_all(self) -> None:
        while self._is_short:
            with self._growing:
                if self._is_short:
                    self._grow(self._region_bytes)

    def trim(self) -> None:
        """Give regions back that nobody uses, and make no more until somebody asks."""
        self._has_users = False
        with self._growing, self._lock:
            self._refusal = ""
            if not self._regions:
                return
            self._collect()
            unused = [region for region in self._regions if region.is_unused]
            self._regions = [region for region in self._regions if not region.is_unused]
        for region in unused:
            self._pinning.unpin(region.address)


POOL = PinnedPool()


def pinned_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy in pinned memory. Of a GPU's tensor it is whole when this returns."""
    return POOL.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)
