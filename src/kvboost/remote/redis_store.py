"""A shared store in Redis or Valkey: one server or a cluster. Needs redis-py with hiredis (extra `redis`).

Look-ups are one pipeline, so one round trip (one per node in a cluster). What goes when memory is full is the
server's own choice (maxmemory-policy). Knows names and bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from kvboost.errors import InvalidRequestError
from kvboost.remote.byte_store import (
    DENIED,
    FAILED,
    FULL,
    MOST_VALUE_BYTES,
    TIMEOUT,
    UNREACHABLE,
    ByteStore,
    StoreError,
    Value,
)
from kvboost.store_address import without_password

try:
    import redis
    from redis import exceptions
    from redis.backoff import NoBackoff
    from redis.cluster import RedisCluster
    from redis.connection import parse_url
    from redis.retry import Retry
except ImportError as error:
    raise InvalidRequestError(
        f"remote_cache in Redis needs the extra `redis` (pip install redis hiredis): {error}"
    ) from error

_CONNECT_S = 1.0
_ANSWER_S = 5.0  # a request waits no longer than its own deadline; this ends a connection that hangs
_READ_BYTES = 1 << 20  # per call of recv: values are megabytes
_CLAIM, _CLAIM_MS = ":claim", 15_000
_SCAN = 1_000
_FIRST_PART = ":0"


class RedisStore(ByteStore):
    """Values in a Redis server or cluster."""

    sample_every = 16

    def __init__(self, address: str) -> None:
        self.name = without_password(address)
        scheme, _, rest = address.partition("://")
        self._is_cluster = scheme.endswith("+cluster")
        options: dict[str, Any] = {
            "socket_connect_timeout": _CONNECT_S,
            "socket_timeout": _ANSWER_S,
            "socket_read_size": _READ_BYTES,
        }
        try:
            if self._is_cluster:
                # The first question opens the connections: a cluster that is down now may come back.
                self._url = f"{scheme.removesuffix('+cluster')}://{rest}"
                parse_url(self._url)  # type: ignore[no-untyped-call]
                # Slots that have moved are looked for again, a few times.
                self._options = {**options, "retry": Retry(NoBackoff(), 3)}
                self._made: Any = None
            else:
                retry = Retry(NoBackoff(), 1)  # once: a connection that was closed meanwhile
                self._made = redis.Redis.from_url(address, retry=retry, **options)
        except (ValueError, exceptions.RedisError):  # what they say may quote a password
            raise InvalidRequestError(
                f"remote_cache={self.name!r} cannot be read: redis://user:password@host:port/db?option=value "
                "is expected, with %2F and so on for what is no letter or digit in user and password"
            ) from None

    @property
    def _client(self) -> Any:
        if self._made is None:
            self._made = RedisCluster.from_url(self._url, **self._options)
        return self._made

    def _run(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """The answers to several commands, in one round trip; None for values that are no bytes."""
        try:
            pipeline = self._client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            self.num_trips += 1
            found = [_answer(each) for each in pipeline.execute(raise_on_error=False)]
        except (exceptions.RedisError, OSError) as error:
            raise _store_error(error) from error
        if failed := next((each for each in found if isinstance(each, Exception)), None):
            raise _store_error(failed) from failed
        return found

    def peek(self, names: Sequence[str], size: int) -> list[bytes | None]:
        if not names:
            return []
        self.asked_last = names[0]
        return [value or None for value in self._run([("GETRANGE", name, 0, size - 1) for name in names])]

    def read(self, names: Sequence[str]) -> list[Value | None]:
        # Not GET: what others have put there may be half a gigabyte.
        return list(self.peek(names, MOST_VALUE_BYTES))

    def write(self, values: Sequence[tuple[str, Sequence[Value]]]) -> None:
        # Commands of a pipeline run in order; in a cluster only those of one node do.
        steps = [values] if not self._is_cluster else [values[:-1], values[-1:]]
        for step in steps:
            if step:
                commands: list[Sequence[Any]] = [("SET", name, b"".join(each)) for name, each in step]
                self._run(commands + _without_claims([name for name, _ in step]))

    def claim(self, names: Sequence[str]) -> list[bool]:
        commands: list[Sequence[Any]] = []
        for name in names:
            commands += [("EXISTS", name), ("SET", name + _CLAIM, b"", "NX", "PX", _CLAIM_MS)]
        found = self._run(commands) if commands else []
        return [not there and bool(ours) for there, ours in zip(found[::2], found[1::2], strict=True)]

    def delete(self, names: Sequence[str]) -> None:
        if names:  # with the claim: who computes it again must be able to write it at once
            self._run([("UNLINK", name) for name in names] + _without_claims(names))

    def ping(self) -> None:
        self._run([("GETRANGE", self.asked_last, 0, 0)])

    def names(self, prefix: str) -> Iterator[tuple[str, int]]:
        try:
            found = self._client.scan_iter(match=f"{prefix}*", count=_SCAN)
            while batch := [key.decode() for key in itertools.islice(found, _SCAN)]:
                yield from zip(batch, self._run([("STRLEN", name) for name in batch]), strict=True)
        except (exceptions.RedisError, OSError) as error:
            raise _store_error(error) from error

    def about(self) -> dict[str, Any]:
        try:
            memory = self._client.info("memory")
            stats = self._client.info("stats")
        except (exceptions.RedisError, OSError) as error:
            raise _store_error(error) from error
        if self._is_cluster:
            return {"nodes": len(self._client.get_nodes())}
        return {
            "used_bytes": memory.get("used_memory"),
            "max_bytes": memory.get("maxmemory"),
            "policy": memory.get("maxmemory_policy"),
            "evicted": stats.get("evicted_keys"),
        }

    def close(self) -> None:
        if self._made is not None:
            self._made.close()


def _answer(found: Any) -> Any:
    """One answer; None for what is under the name of a value and is none, as absent ones."""
    is_other = isinstance(found, exceptions.ResponseError) and str(found).startswith("WRONGTYPE")
    return None if is_other else found


def _without_claims(names: Sequence[str]) -> list[Sequence[Any]]:
    """Commands that end what was claimed: records, which are claimed by their first part."""
    return [("UNLINK", name + _CLAIM) for name in names if name.endswith(_FIRST_PART)]


def _store_error(error: Exception) -> StoreError:
    """In our words: what is counted must not depend on an address or a key."""
    text = str(error)
    if isinstance(error, exceptions.OutOfMemoryError) or "OOM" in text[:64]:
        return StoreError(FULL, text)
    if isinstance(error, (exceptions.AuthenticationError, exceptions.NoPermissionError)):
        return StoreError(DENIED, text)
    if any(word in text for word in ("NOAUTH", "WRONGPASS", "NOPERM", "invalid username")):
        return StoreError(DENIED, text)
    if isinstance(error, (exceptions.TimeoutError, TimeoutError)):
        return StoreError(TIMEOUT, text)
    if isinstance(error, (exceptions.ConnectionError, OSError)):
        return StoreError(UNREACHABLE, text)
    return StoreError(FAILED, f"{type(error).__name__}: {text}")
