"""Running an application: the socket, signals, and a shutdown that loses no finished answer.

On the first SIGTERM or SIGINT new requests get a 503 while those that run are finished; then the socket is
closed. A second signal gives up what runs. Knows uvicorn, and no command line.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from kvboost.engine import InferenceEngine
from kvboost.errors import KVBoostError
from kvboost.server.app import create_app
from kvboost.server.asgi import ABORT
from kvboost.server.service import Service
from kvboost.server.settings import ServerSettings

_SENDING_S = 10  # at shutdown, for clients that are slow to read the rest of their answers


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket bound to this address, not listening yet."""
    sock: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, OverflowError) as error:
        if sock is not None:
            sock.close()
        raise KVBoostError(
            f"cannot listen on {host}:{port}: {error}; choose another --host or --port"
        ) from error
    return sock


def url_of(sock: socket.socket) -> str:
    """Where a browser on this machine finds the socket."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{port}"


class Config(uvicorn.Config):
    """Uvicorn's options, and how long a client may take to send its headers and to read what is sent."""

    header_timeout_s = 30.0
    unread_timeout_s = 600.0


class Connection(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    """A client's connection: it can be dropped from within a request, and ends if no request comes.

    It ends as well if what was sent is not read.
    """

    app_state: dict[str, Any]
    _no_request: asyncio.TimerHandle | None = None
    _not_read: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.app_state = {**self.app_state, ABORT: transport.abort}
        self._wait_for_request()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._is_read()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The socket's buffer is full: the client does not read."""
        super().pause_writing()
        if self._not_read is None:
            self._not_read = self.loop.call_later(self.config.unread_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._is_read()

    def _is_read(self) -> None:
        if self._not_read is not None:
            self._not_read.cancel()
            self._not_read = None

    def _wait_for_request(self) -> None:
        """Headers that come byte by byte have one deadline for all of them."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._no_request is None:
            self._no_request = self.loop.call_later(self.config.header_timeout_s, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._no_request is not None:
            self._no_request.cancel()
            self._no_request = None


class Server(uvicorn.Server):
    """Uvicorn, with a shutdown in the order that this server needs."""

    def __init__(self, config: uvicorn.Config, service: Service, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self.service = service
        self.ready = threading.Event()
        self._on_ready = on_ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ends: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        if self.started:
            self.ready.set()
            self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """A signal: begin the shutdown, or end at once."""
        self.stop()

    def stop(self) -> None:
        """End when what runs is finished; the second time, at once. From any thread."""
        if self._loop is None:
            self.should_exit = True
        else:
            with suppress(RuntimeError):  # the event loop is closed: it has ended already
                self._loop.call_soon_threadsafe(self._begin_to_end)

    def _begin_to_end(self) -> None:
        timeout_s = 0.0 if self._ends else None
        self._ends.append(asyncio.ensure_future(self._finish(timeout_s)))

    async def _finish(self, timeout_s: float | None) -> None:
        self.service.begin_shutdown()
        await asyncio.to_thread(self.service.close, timeout_s)
        self.should_exit = True


def make_server(
    engine: InferenceEngine,
    settings: ServerSettings,
    on_ready: Callable[[], None] = lambda: None,
) -> Server:
    """A server over `engine` that is not running yet."""
    app = create_app(engine, settings)
    config = Config(
        app,
        http=Connection,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_SENDING_S,
    )
    config.header_timeout_s = settings.read_timeout_s
    config.unread_timeout_s = settings.timeout_s
    return Server(config, app.state.service, on_ready)


@contextmanager
def background_server(
    engine: InferenceEngine, settings: ServerSettings, host: str = "127.0.0.1", port: int = 0
) -> Iterator[str]:
    """A server in a thread for as long as the block lasts; yields its URL. Port 0 takes a free one."""
    with listening_socket(host, port) as sock, in_background(make_server(engine, settings), sock) as url:
        yield url


@contextmanager
def in_background(server: Server, sock: socket.socket) -> Iterator[str]:
    """Run `server` in a thread; yields its URL when it can be reached. At the end it finishes what runs."""
    thread = threading.Thread(target=server.run, args=([sock],), name="kvboost-http", daemon=True)
    thread.start()
    while not server.ready.wait(0.1):
        if not thread.is_alive():
            raise KVBoostError("the server did not start")
    try:
        yield url_of(sock)
    finally:
        server.stop()
        thread.join()
