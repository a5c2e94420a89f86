"""What a model is right now, read at a cost that every request can bear.

Two readings are equal exactly when KV of the first may serve the second. Each reading compares the modules,
parameters and buffers with the adapters, config and settings around them (`structure`), and the tensors'
addresses, version counters and some of their values (`weights`). A write to a few values of a tensor that
moves no counter is found by a checksum in a background thread (`scrubber`), or by `check_all`. In a state
that cannot be known a reading says so, and nothing is read or stored then. Knows models, no cache.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kvboost import locks
from kvboost.identity import scrubber
from kvboost.identity.structure import ModelStructure, gated_reason, surroundings_of
from kvboost.identity.weights import Checksum, KnownTensors, checksum, place_of, versions_of


@dataclass(frozen=True)
class ModelState:
    """One reading. `version` counts the changes seen; `gated` says why nothing may be reused now, if so.

    `surprises` counts changes that were overlooked for a while, though KV was stored meanwhile: under which
    weights that was computed is not known. `places` counts the times that tensors were replaced, moved or
    written to, with other values or not.
    """

    version: int
    structure: int
    surprises: int = 0
    gated: str = ""
    places: int = 0


class ModelWatch:
    """Reads the state of one model. Engines on the same model share it; it holds the model only weakly."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = weakref.ref(model)
        self._lock = locks.fork_safe_rlock()
        self._volatile: frozenset[str] = frozenset()
        self._structure = ModelStructure(model, self._volatile)
        self._known: KnownTensors | None = None
        self._surroundings: Any = None
        self._version = 0
        self._structure_version = 0
        self._looks = 0
        self._suspects: set[str] = set()  # names of tensors whose checksum has changed
        self._surprises = 0
        self._stored = [False, False]  # was KV stored: before the scrubber's current pass, and since
        self._scrubbing: Iterator[int] | None = None
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()  # engines

    @property
    def model(self) -> torch.nn.Module:
        model = self._model()
        if model is None:
            raise RuntimeError("the model is gone")
        return model

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters and buffers."""
        return self._known.nbytes if self._known is not None else 0

    def read(self) -> ModelState:
        """The state now. Checks over only what may have changed."""
        model = self.model
        scrubber.SCRUBBER.ensure_running()
        with self._lock:
            known = self._compare(model)
            gated = gated_reason(model, self._structure, known.device_types)
            if known.is_elsewhere:
                gated = gated or "gated: weights are offloaded"
            return ModelState(self._version, self._structure_version, self._surprises, gated, self._looks)

    def check_all(self) -> bool:
        """Compare the checksums of all values with those known; returns whether any had changed."""
        model = self.model
        with self._lock:
            before = self._version
            known = self._compare(model)
            tensors = known.tensors(self._structure.present())
            self._suspects |= {
                name
                for name, tensor, value in zip(known.names, tensors, known.checksums, strict=True)
                if checksum(tensor) != value
            }
            if not self._suspects:
                self._stored = [False, False]
            self._compare(model)
            return self._version != before

    def note_stored(self) -> None:
        """KV of the model as it was read last is stored now."""
        self._stored[1] = True

    def checksums(self) -> dict[str, str]:
        """The checksum of every tensor, by name, as of the last reading."""
        with self._lock:
            known = self._known
            assert known is not None
            each = zip(known.names, known.kinds, known.checksums, strict=True)
            return {name: f"{kind}|{value.hex()}" for name, kind, value in each}

    def read_for(self) -> tuple[ModelState, dict[str, str], Any]:
        """A reading with the checksums and surroundings that it goes by, all of one moment."""
        with self._lock:
            state = self.read()
            return state, self.checksums(), self._surroundings

    def release_if_unused(self) -> None:
        """Unless an engine still uses it, hold no memory of the model until it is read again."""
        if not self.users and self._lock.acquire(blocking=False):  # garbage is collected in any thread
            try:
                self._known = None
            finally:
                self._lock.release()

    def checksum_of(self, tensor: torch.Tensor) -> bytes | None:
        """The checksum of one of the model's tensors as of the last reading; None where it was not read."""
        known = self._known
        number = known.numbers.get(id(tensor)) if known is not None else None
        return known.checksums[number] if known is not None and number is not None else None

    def changed_buffers(self, before: dict[str, str]) -> set[str]:
        """Buffers whose values are not what `before` says, the checksums of an earlier time by name."""
        self.read()
        buffers = {name for name, _ in self.model.named_buffers()}
        now = self.checksums()
        return {name for name in buffers & before.keys() & now.keys() if before[name] != now[name]}

    def ignore(self, names: set[str]) -> None:
        """Leave these out from now on: the model's own forward changes them."""
        with self._lock:
            self._volatile |= names
            self._structure = ModelStructure(self.model, self._volatile)
            self._known = None
        self.read()

    # --- comparing ---------------------------------------------------------------------------

    def _compare(self, model: torch.nn.Module) -> KnownTensors:
        if not self._structure.is_current():
            self._structure = ModelStructure(model, self._volatile)
            self._structure_version += 1
            locks.forget_model_lock(model)
        surroundings = surroundings_of(model, self._structure)
        if surroundings != self._surroundings:
            self._surroundings = surroundings
            self._version += 1
            self._structure_version += 1
        present = self._structure.present()
        known = self._known
        if known is None or self._suspects or not known.is_same(present) or known.probe.differs():
            return self._look_over(present, known)
        return known

    def _look_over(self, present: list[torch.Tensor | None], known: KnownTensors | None) -> KnownTensors:
        """Take the checksums of tensors that may have changed."""
        self._looks += 1
        fresh = KnownTensors(self._structure, present)
        tensors = fresh.tensors(present)
        before, untouched = self._as_before(known, fresh)
        has_changed = known is None or known.names != fresh.names or known.kinds != fresh.kinds
        for number, (name, tensor) in enumerate(zip(fresh.names, tensors, strict=True)):
            value = before[name] if number in untouched else checksum(tensor)
            fresh.checksums.append(value)
            has_changed |= before.get(name) != value
        self._structure_version += known is None or known.kinds != fresh.kinds
        self._version += has_changed
        self._known = fresh
        if self._suspects and any(self._stored):
            self._surprises += 1
        if self._suspects:
            self._stored = [False, False]
        self._suspects.clear()
        return fresh

    def _as_before(
        self, known: KnownTensors | None, fresh: KnownTensors
    ) -> tuple[dict[str, bytes], set[int]]:
        """The known checksums by name, and the numbers of tensors that show no sign of a change."""
        if known is None:
            return {}, set()
        before = dict(zip(known.names, known.checksums, strict=True))
        if known.names != fresh.names or known.ids != fresh.ids:
            return before, set()
        if known.places != fresh.places and not known.probe.holds_memory:
            return before, set()
        written = known.probe.changed()
        return before, {
            number
            for number, name in enumerate(fresh.names)
            if name not in self._suspects
            and number not in written
            and known.versions[number] == fresh.versions[number]
            and known.places[number] == fresh.places[number]
        }

    # --- scrubbing ---------------------------------------------------------------------------

    def scrub(self, most_bytes: int) -> bool:
        """Check over some more of the values; returns whether a pass has ended. For the scrubber."""
        if self._scrubbing is None:
            self._scrubbing = self._pass(most_bytes)
        if next(self._scrubbing, None) is not None:
            return False
        self._scrubbing = None
        return True

    def _pass(self, most_bytes: int) -> Iterator[int]:
        with self._lock:
            known = self._known
            self._stored = [any(self._stored), False]
            present = self._structure.present()
            if known is None or not known.is_same(present):
                self._known = None  # the next reading looks it all over; until then no old memory is held
                return
            tensors = [weakref.ref(tensor) for tensor in known.tensors(present)]
        del present
        left = most_bytes
        for number, reference in enumerate(tensors):
            tensor = reference()
            if tensor is None or tensor.is_meta or tensor.numel() == 0:
                continue
            part = Checksum(tensor)
            while count := part.advance(left):
                left -= count
                if left <= 0:
                    yield number
                    left = most_bytes
            with self._lock:
                is_same = versions_of([tensor])[0] == known.versions[number]
                if self._known is not known or not is_same or place_of(tensor) != known.places[number]:
                    return
                if part.digest() != known.checksums[number]:
                    self._suspects.add(known.names[number])
            del tensor, part
        with self._lock:
            if self._known is known and not self._suspects:
                self._stored[0] = False


_watches: weakref.WeakKeyDictionary[Any, ModelWatch] = weakref.WeakKeyDictionary()
_guard = locks.fork_safe_lock()


def watch_of(model: torch.nn.Module) -> ModelWatch:
    """The watch of a model, one for all who use it."""
    with _guard:
        if model not in _watches:
            _watches[model] = ModelWatch(model)
        return _watches[model]
