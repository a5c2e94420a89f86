"""Keys of the chunks that are on disk too, and of those that are to be saved.

Works under the lock of the chunk store. Knows keys only: no chunks, no files.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class SavedKeys:
    """What is on disk, what is not yet, what was used, and what is of no use there any more."""

    def __init__(self) -> None:
        self._is_on = False  # whether there is a disk to save to
        self._saved: set[str] = set()
        self._unsaved: OrderedDict[str, None] = OrderedDict()  # in the order in which they came
        self._used: dict[str, None] = {}  # of the saved ones, since somebody asked last
        self._obsolete: list[str] = []  # saved ones that a longer chunk has replaced

    def __contains__(self, key: str) -> bool:
        """Whether a chunk is on disk."""
        return key in self._saved

    @property
    def num_unsaved(self) -> int:
        return len(self._unsaved)

    def start(self, keys: Iterable[str]) -> None:
        """Note from now on what is to be saved, first what of `keys` is not on disk."""
        self._is_on = True
        self._unsaved = OrderedDict.fromkeys(key for key in keys if key not in self._saved)

    def stop(self) -> None:
        """Note nothing any more."""
        self._is_on = False
        self._unsaved.clear()

    def note_new(self, key: str) -> None:
        """A chunk is to be saved, unless it is."""
        if self._is_on and key not in self._saved:
            self._unsaved[key] = None

    def note_found(self, key: str) -> None:
        """A chunk was found on disk: it need not be saved."""
        self._saved.add(key)
        self._unsaved.pop(key, None)

    def note_written(self, key: str) -> None:
        """A chunk was written; where it was noted again since it was taken, it stays so."""
        self._saved.add(key)

    def note_gone(self, key: str) -> None:
        """A chunk is no longer on disk."""
        self._saved.discard(key)

    def note_used(self, key: str) -> None:
        """A chunk was used."""
        if key in self._saved:
            self._used[key] = None

    def forget(self, key: str, *, replaced: bool) -> None:
        """The store has dropped a chunk; where a longer one has replaced it, the disk can drop it too."""
        if replaced and key in self._saved:
            self._obsolete.append(key)
        self._saved.discard(key)
        self._unsaved.pop(key, None)
        self._used.pop(key, None)

    def is_obsolete(self, key: str) -> bool:
        """Whether a chunk was replaced and the disk still has it."""
        return key in self._obsolete

    def note_back(self, key: str) -> None:
        """The store has taken a replaced chunk in again."""
        if key in self._obsolete:
            self._obsolete.remove(key)
            self._saved.add(key)

    def take_unsaved(self) -> str | None:
        """The next key to save, or None."""
        return self._unsaved.popitem(last=False)[0] if self._unsaved else None

    def take_used(self) -> list[str]:
        """Keys of saved chunks that were used since this was asked last."""
        taken, self._used = self._used, {}
        return list(taken)

    def take_obsolete(self) -> list[str]:
        """Keys of saved chunks that were replaced since this was asked last."""
        taken, self._obsolete = self._obsolete, []
        return taken
