"""A Redis server that lies, is slow or is away: a TCP proxy that can spoil what passes through it.

It reads the answers of the server one by one, so that what it spoils is a value and not the protocol, unless
that is asked for. Knows the protocol of Redis as far as needed, and nothing of kvboost.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable
from typing import IO

from tests.remote.servers import HOST

_LEAST_BYTES = 32  # shorter values are words of the protocol
Spoil = Callable[[bytes], bytes]


class Proxy:
    """Stands before a server. Its attributes say what it does, at every moment."""

    def __init__(self, port: int, seed: int = 0) -> None:
        self._target = port
        self._draw = random.Random(seed)
        self._seen: list[bytes] = []  # values, to be given instead of others
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self.delay_s = 0.0  # before every call
        self.spoil: Spoil | None = None
        self.cuts_off = False  # connections end in the middle of a value
        self.is_away = False  # connections are refused, and those that are there end
        self.spoiled = 0
        self._listener = socket.create_server((HOST, 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}"

    # --- what it can do to a value -----------------------------------------------------------

    def flip(self, value: bytes) -> bytes:
        """One bit is another."""
        at = self._draw.randrange(len(value))
        return value[:at] + bytes([value[at] ^ 1 << self._draw.randrange(8)]) + value[at + 1 :]

    def truncate(self, value: bytes) -> bytes:
        return value[: self._draw.randrange(len(value))]

    def swap(self, value: bytes) -> bytes:
        """Another value that was read before."""
        with self._lock:
            other = self._draw.choice(self._seen) if self._seen else value
            self._seen = [*self._seen[-50:], value]
        return other

    def any_of_them(self, value: bytes) -> bytes:
        return self._draw.choice([self.flip, self.truncate, self.swap])(value)

    def well_behaved(self) -> None:
        self.delay_s, self.spoil, self.cuts_off, self.is_away = 0.0, None, False, False

    def go_away(self) -> None:
        self.is_away = True
        with self._lock:
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    # --- passing on --------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.is_away:
                client.close()
                continue
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection((HOST, self._target), timeout=10)
        except OSError:
            client.close()
            return
        server.settimeout(None)
        for each in (client, server):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._open |= {client, server}
        answered = threading.Event()
        answered.set()
        back = threading.Thread(target=self._answers, args=(server, client, answered), daemon=True)
        back.start()
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                if self.delay_s and answered.is_set():  # a new call, not the rest of one
                    time.sleep(self.delay_s)
                answered.clear()
                server.sendall(data)
        for each in (client, server):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        back.join(5.0)
        with self._lock:
            self._open -= {client, server}
        client.close()
        server.close()

    def _answers(self, server: socket.socket, client: socket.socket, answered: threading.Event) -> None:
        with contextlib.suppress(OSError, EOFError, ValueError), server.makefile("rb") as file:
            while True:
                self._answer(file, client)
                answered.set()
        for each in (client, server):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _answer(self, file: IO[bytes], client: socket.socket) -> None:
        line = file.readline()
        if not line:
            raise EOFError
        kind, rest = line[:1], line[1:].strip()
        if kind in b"$=!" and rest != b"-1":
            value = _exactly(file, int(rest) + 2)[:-2]
            client.sendall(self._value(kind, value))
            if self.cuts_off and len(value) >= _LEAST_BYTES:
                raise EOFError
            return
        client.sendall(line)
        if kind in b"*~>%|" and rest != b"-1":
            for _ in range(int(rest) * (2 if kind in b"%|" else 1)):
                self._answer(file, client)

    def _value(self, kind: bytes, value: bytes) -> bytes:
        if len(value) >= _LEAST_BYTES and kind == b"$":
            if self.cuts_off:
                self.spoiled += 1
                return b"$%d\r\n%b" % (len(value), value[: len(value) // 2])
            if self.spoil is not None:
                other = self.spoil(value)
                self.spoiled += other != value
                value = other
        return b"%b%d\r\n%b\r\n" % (kind, len(value), value)

    def close(self) -> None:
        self._listener.close()
        self.go_away()


def _exactly(file: IO[bytes], size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise EOFError
    return data
