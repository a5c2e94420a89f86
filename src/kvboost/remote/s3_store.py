"""A shared store in a bucket of S3, or of anything that speaks its protocol. Needs obstore (extra `s3`).

`s3://bucket/prefix`; another endpoint by `?endpoint=http://host:port` or AWS_ENDPOINT_URL. Who may read and
write says the environment (AWS_ACCESS_KEY_ID and so on), as for other AWS programs. All objects of a look-up
are asked for at once. What goes and when is a matter of the bucket's lifecycle rules. Knows names and bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

from kvboost.errors import InvalidRequestError
from kvboost.remote.byte_store import (
    DENIED,
    FAILED,
    MOST_VALUE_BYTES,
    TIMEOUT,
    UNREACHABLE,
    ByteStore,
    StoreError,
    Value,
)
from kvboost.store_address import without_password

try:
    import obstore
    from obstore import exceptions
    from obstore.store import S3Store as Bucket
except ImportError as error:
    raise InvalidRequestError(
        f"remote_cache in S3 needs the extra `s3` (pip install obstore): {error}"
    ) from error

T = TypeVar("T")
_AT_ONCE = 64
_ANSWER_S = 10.0
_OPTIONS = ("endpoint", "region")


class S3Store(ByteStore):
    """Values as objects of a bucket."""

    sample_every = 32

    def __init__(self, address: str) -> None:
        self.name = without_password(address)
        parts = urlsplit(address)
        options = dict(parse_qsl(parts.query))
        if not parts.hostname or any(name not in _OPTIONS for name in options):
            raise InvalidRequestError(
                f"remote_cache in S3 must be s3://bucket/prefix, with ?endpoint= or &region= at most; "
                f"got {self.name!r} with {sorted(options)}"
            )
        endpoint = options.get("endpoint") or os.environ.get("AWS_ENDPOINT_URL")
        region = options.get("region") or os.environ.get("AWS_REGION", "us-east-1")
        config: dict[str, Any] = {"region": region, "virtual_hosted_style_request": False}
        if endpoint:
            config["endpoint"] = endpoint
        try:
            self._bucket = Bucket(
                parts.hostname,
                prefix=parts.path.strip("/") or None,
                config=config,  # type: ignore[arg-type]  # names that its type has not
                client_options={
                    "allow_http": bool(endpoint and endpoint.startswith("http://")),
                    "connect_timeout": timedelta(seconds=1),
                    "timeout": timedelta(seconds=_ANSWER_S),
                },
                retry_config={"max_retries": 1, "retry_timeout": timedelta(seconds=2)},
            )
        except (exceptions.BaseError, ValueError, TypeError) as error:
            raise InvalidRequestError(f"remote_cache={self.name!r}: {error}") from error
        self._loop = _Loop()

    @staticmethod
    def _path(name: str) -> str:
        return name.replace(":", "/")

    def _all(self, calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
        """What several calls give, made at once."""
        if not calls:
            return []
        self.num_trips += 1
        try:
            return self._loop.run(calls)
        except FileNotFoundError as error:  # of reading, that is a miss; of anything else, there is no bucket
            raise StoreError(FAILED, str(error)) from error
        except exceptions.BaseError as error:
            raise _store_error(error) from error
        except (TimeoutError, OSError) as error:
            raise StoreError(TIMEOUT, str(error)) from error

    def peek(self, names: Sequence[str], size: int) -> list[bytes | None]:
        self.asked_last = names[0] if names else self.asked_last
        return [None if each is None else bytes(each) for each in self._starts(names, size)]

    def read(self, names: Sequence[str]) -> list[Value | None]:
        return self._starts(names, MOST_VALUE_BYTES)

    def _starts(self, names: Sequence[str], size: int) -> list[Value | None]:
        def call(name: str) -> Callable[[], Awaitable[Value | None]]:
            async def get() -> Value | None:
                try:
                    what = self._bucket, self._path(name)
                    return memoryview(await obstore.get_range_async(*what, start=0, length=size))
                except FileNotFoundError:
                    return None

            return get

        return self._all([call(name) for name in names])

    def write(self, values: Sequence[tuple[str, Sequence[Value]]]) -> None:
        def call(name: str, buffers: Sequence[Value]) -> Callable[[], Awaitable[None]]:
            async def put() -> None:
                await obstore.put_async(
                    self._bucket, self._path(name), b"".join(buffers), use_multipart=False
                )

            return put

        for step in (values[:-1], values[-1:]):
            self._all([call(*each) for each in step])

    def claim(self, names: Sequence[str]) -> list[bool]:
        return [start is None for start in self.peek(names, 1)]

    def delete(self, names: Sequence[str]) -> None:
        def call(name: str) -> Callable[[], Awaitable[None]]:
            async def delete() -> None:
                with contextlib.suppress(FileNotFoundError):
                    await obstore.delete_async(self._bucket, self._path(name))

            return delete

        self._all([call(name) for name in names])

    def ping(self) -> None:
        self.peek([self.asked_last], 1)

    def names(self, prefix: str) -> Iterator[tuple[str, int]]:
        try:
            for batch in obstore.list(self._bucket, prefix=self._path(prefix).rstrip("/")):
                yield from ((each["path"].replace("/", ":"), each["size"]) for each in batch)
        except exceptions.BaseError as error:
            raise _store_error(error) from error

    def about(self) -> dict[str, Any]:
        return {"policy": "the bucket's lifecycle rules"}

    def close(self) -> None:
        self._loop.close()


class _Loop:
    """An event loop in a thread of its own, for calls that are to be made at once."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._lock = threading.Lock()

    def run(self, calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
        async def one(call: Callable[[], Awaitable[T]], room: asyncio.Semaphore) -> T:
            async with room:
                return await call()

        async def all_of_them() -> list[T]:
            room = asyncio.Semaphore(_AT_ONCE)
            return list(await asyncio.gather(*(one(call, room) for call in calls)))

        return asyncio.run_coroutine_threadsafe(all_of_them(), self._running()).result(4 * _ANSWER_S)

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None or self._pid != os.getpid():  # threads stay with the parent of a fork
                self._loop, self._pid = asyncio.new_event_loop(), os.getpid()
                threading.Thread(target=_serve, args=(self._loop,), name="kvboost-s3", daemon=True).start()
            return self._loop

    def close(self) -> None:
        with self._lock:
            if self._loop is not None and self._pid == os.getpid():
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _store_error(error: Exception) -> StoreError:
    """In our words. Behind the first part of its text obstore shows all settings, timeouts among them."""
    text = str(error).partition("\n\nDebug source")[0]
    if isinstance(error, (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)):
        return StoreError(DENIED, text)
    if "timed out" in text:
        return StoreError(TIMEOUT, text)
    if "error sending request" in text or "connect" in text.lower():
        return StoreError(UNREACHABLE, text)
    return StoreError(FAILED, f"{type(error).__name__}: {text}")
