"""The probe of a model's weights on a CUDA device: one kernel gathers words by their addresses.

Hundreds of tensors are looked at in one launch, and one flag comes back. It holds no tensor alive: its
caller has compared where all tensors lie before it reads. Knows addresses, no model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

try:  # comes with torch for CUDA
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_BLOCK = 256


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _gather(addresses, seen, found, flag, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        address = tl.load(addresses + at, mask=inside, other=0)
        words = tl.load(address.to(tl.pointer_type(tl.int16)), mask=inside, other=0)
        before = tl.load(seen + at, mask=inside, other=0)
        tl.store(found + at, words, mask=inside)
        tl.atomic_max(flag, tl.max((words != before).to(tl.int32), axis=0))


def is_available() -> bool:
    """Whether the kernel can be made here."""
    return triton is not None


class CudaProbe:
    """Words of 2 bytes of tensors on one CUDA device.

    `offsets_of` says which values of a tensor are looked at, counted from its first one.
    """

    def __init__(
        self,
        device: torch.device,
        tensors: Sequence[tuple[int, torch.Tensor]],
        offsets_of: Callable[[torch.Tensor], np.ndarray],
    ) -> None:
        addresses, sizes, self._numbers = [], [], []
        for number, tensor in tensors:
            size = tensor.element_size()
            first = tensor.data_ptr() + offsets_of(tensor).astype(np.int64) * size
            # A value of one byte is read with its neighbour: memory on a device comes in larger pieces.
            words = np.concatenate([first // 2 * 2 + 2 * each for each in range(max(1, size // 2))])
            addresses.append(words)
            sizes.append(len(words))
            self._numbers.append(number)
        table = np.concatenate(addresses).astype(np.int64) if addresses else np.zeros(0, dtype=np.int64)
        self._ends = np.cumsum([0, *sizes]).tolist()
        self._size = len(table)
        self._device = device
        self._addresses = torch.from_numpy(table).to(device)
        self._seen = torch.zeros(self._size, dtype=torch.int16, device=device)
        self._found = torch.zeros(self._size, dtype=torch.int16, device=device)
        self._flag = torch.zeros(1, dtype=torch.int32, device=device)

    def note(self) -> None:
        """Remember what is there now."""
        self.differs()
        self._seen.copy_(self._found)

    def differs(self) -> bool:
        """Whether any word is not as it was when it was noted."""
        if not self._size:
            return False
        with torch.cuda.device(self._device):
            self._flag.zero_()
            grid = (-(-self._size // _BLOCK),)
            _gather[grid](self._addresses, self._seen, self._found, self._flag, self._size, BLOCK=_BLOCK)
            return bool(self._flag.item())

    def changed(self) -> set[int]:
        """The numbers of the tensors of which a word is not as it was."""
        self.differs()
        before, now = self._seen.cpu().numpy(), self._found.cpu().numpy()
        spans = zip(self._numbers, self._ends[:-1], self._ends[1:], strict=True)
        return {number for number, start, end in spans if (before[start:end] != now[start:end]).any()}
