"""What a shared store must be able to do: keep bytes by name. Which store it is, its address says.

Knows names and bytes, no records and no model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from kvboost.errors import KVBoostError
from kvboost.store_address import check_remote_address

Value = bytes | memoryview
MOST_VALUE_BYTES = 5 << 20  # parts have less; others are none of ours


class StoreError(KVBoostError):
    """A shared store that did not do what it was asked; `reason` is one of a few words, for counting."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


UNREACHABLE = "not reachable"
TIMEOUT = "no answer in time"
DENIED = "access denied"
FULL = "full"
FAILED = "failed"


class ByteStore(ABC):
    """Bytes by name, for several processes and machines. May be called from any thread.

    Every method takes as long as the store does, and raises `StoreError`. `num_trips` counts round trips.
    """

    name: str  # its address, without passwords
    sample_every: int  # of how many windows of a text one is indexed
    num_trips: int = 0
    asked_last: str = "kvb:ping"  # a name that may be asked for, where rules of access allow a tenant's only

    @abstractmethod
    def peek(self, names: Sequence[str], size: int) -> list[bytes | None]:
        """The first `size` bytes of each, in one round trip; None for what is not there."""

    @abstractmethod
    def read(self, names: Sequence[str]) -> list[Value | None]:
        """Whole values, in one round trip; of what is longer than any part, only the start."""

    @abstractmethod
    def write(self, values: Sequence[tuple[str, Sequence[Value]]]) -> None:
        """Write values, each given as buffers that follow one another: the last only after the others."""

    @abstractmethod
    def claim(self, names: Sequence[str]) -> list[bool]:
        """For each, whether this process should write it: it is not there, and nobody else is at it."""

    @abstractmethod
    def delete(self, names: Sequence[str]) -> None:
        """Forget values; names that are not there are no error."""

    @abstractmethod
    def ping(self) -> None:
        """Return if it answers when it is asked for what it was asked for last."""

    @abstractmethod
    def names(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Names that begin with `prefix`, each with the bytes of its value."""

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """What the store says about itself: memory, limits, rule of eviction."""

    @abstractmethod
    def close(self) -> None:
        """Close its connections. It can be called twice."""


def open_store(address: str) -> ByteStore:
    """The store at an address. Nothing is sent yet: one that is down now may come back."""
    if check_remote_address(address).startswith("s3://"):
        from kvboost.remote.s3_store import S3Store

        return S3Store(address)
    from kvboost.remote.redis_store import RedisStore

    return RedisStore(address)
