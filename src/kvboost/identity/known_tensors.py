"""The tensors of a model as they were last read, to see cheaply whether they are the same now.

Knows tensors and their checksums; when to take these is `model_state`'s business.
"""

from __future__ import annotations

import torch

from kvboost.identity.structure import ModelStructure
from kvboost.identity.weights import Probe


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
