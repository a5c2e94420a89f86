"""What the disk cache needs of a place that keeps chunks: a folder, or whatever else `tiers` has.

`DiskCache` saves in a thread of its own and reads in a few others, under a deadline; a tier only stores
records and finds them again. Knows records, no place and no model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvboost.disk.serde import Record, RecordHeader
from kvboost.kv.codec import KeptChunk, KVCodec

CORRUPT = "corrupt"
GONE = "evicted"
OTHER_FORM = "other encoding"
_DEFAULT_CHUNKS = 256


@dataclass(frozen=True)
class TierSpec:
    """What an engine asks of the tier that it opens."""

    name: str  # of the model, dtype, encoding and chunk size: chunks of other names are not for this engine
    codec: KVCodec  # the form of its chunks
    record_bytes: int  # a record of its longest chunk
    max_bytes: int | None = None  # for all names in one place; None = 256 chunks for each
    label: str = ""  # the model, for people

    @property
    def max_chunks(self) -> int:
        """How many chunks of this name there may be at most."""
        return _DEFAULT_CHUNKS if self.max_bytes is None else self.max_bytes // self.record_bytes


class ChunkTier(ABC):
    """Keeps records by key. All methods may be called from any thread.

    `key in tier`, `headers`, `take_evicted`, `is_read_only` and `stats` are called where a request may be
    waiting: they answer from memory, and never wait for the place. The other methods may take long.
    """

    name: str  # what messages call it

    @property
    def is_read_only(self) -> bool:
        """Whether chunks can be read, and none written or removed."""
        return False

    @abstractmethod
    def __contains__(self, key: object) -> bool:
        """Whether the chunk of that key should be there."""

    @abstractmethod
    def headers(self) -> list[RecordHeader]:
        """The headers of all chunks that should be there."""

    @abstractmethod
    def load_or_reason(self, key: str) -> KeptChunk | str:
        """A chunk, read and checked; if it cannot be had, the reason, which is counted too.

        One that is damaged or gone is forgotten, so that it is saved again.
        """

    @abstractmethod
    def write_records(self, records: Sequence[Record]) -> Sequence[bool]:
        """Write several; for each, whether it is there now. The reason where it is not is counted."""

    @abstractmethod
    def touch(self, keys: Sequence[str]) -> None:
        """Count chunks as used just now; keys that are not there are no error."""

    @abstractmethod
    def remove(self, keys: Sequence[str]) -> None:
        """Forget chunks; keys that are not there are no error."""

    @abstractmethod
    def clear(self) -> None:
        """Forget everything; `CacheFileError` where that is not possible."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """At least `chunks`, `bytes`, and counted reasons: `misses` of reads, `refused` of writes."""

    @abstractmethod
    def close(self) -> None:
        """Save nothing any more, and find nothing. It can be called twice."""

    def take_evicted(self) -> list[str]:
        """The keys that made room for others since this was asked last."""
        return []

    def refresh(self) -> bool:
        """Notice what other processes have written; True where `headers` changed."""
        return False
