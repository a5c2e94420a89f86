"""A shared store in this process's memory, which can be slow, full, or away."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from kvboost.remote.byte_store import FULL, ByteStore, StoreError, Value


class MemoryStore(ByteStore):
    """Bytes by name. `error` is raised by every call, `delay_s` waited before each, `gate` waited for."""

    sample_every = 16

    def __init__(self) -> None:
        self.name = "memory://"
        self.values: dict[str, bytes] = {}
        self.claims: set[str] = set()
        self.calls: Counter[str] = Counter()
        self.asked: list[str] = []
        self.peeked: list[int] = []  # how many names each time
        self.error: StoreError | None = None
        self.delay_s = 0.0
        self.gate = threading.Event()
        self.gate.set()
        self.max_bytes = 1 << 40
        self.is_closed = False
        self._lock = threading.Lock()

    def _called(self, what: str, names: Sequence[str] = ()) -> None:
        with self._lock:
            self.calls[what] += 1
            self.num_trips += 1
            self.asked += names
        self.gate.wait(30.0)
        time.sleep(self.delay_s)
        if self.error is not None:
            raise self.error

    def peek(self, names: Sequence[str], size: int) -> list[bytes | None]:
        self._called("peek", names)
        self.peeked.append(len(names))
        return [value[:size] if (value := self.values.get(name)) else None for name in names]

    def read(self, names: Sequence[str]) -> list[Value | None]:
        self._called("read", names)
        return [self.values.get(name) for name in names]

    def write(self, values: Sequence[tuple[str, Sequence[Value]]]) -> None:
        self._called("write", [name for name, _ in values])
        for name, buffers in values:
            value = b"".join(buffers)
            if sum(map(len, self.values.values())) + len(value) > self.max_bytes:
                raise StoreError(FULL)
            self.values[name] = value

    def claim(self, names: Sequence[str]) -> list[bool]:
        self._called("claim", names)
        with self._lock:
            ours = [name not in self.values and name not in self.claims for name in names]
            self.claims.update(names)
        return ours

    def delete(self, names: Sequence[str]) -> None:
        self._called("delete", names)
        for name in names:
            self.values.pop(name, None)

    def ping(self) -> None:
        self._called("ping")

    def names(self, prefix: str) -> Iterator[tuple[str, int]]:
        yield from ((name, len(value)) for name, value in self.values.items() if name.startswith(prefix))

    def about(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self.is_closed = True
