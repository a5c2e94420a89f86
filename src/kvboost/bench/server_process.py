"""An HTTP server in a process of its own: started, waited for, watched and ended.

All that can go wrong with it is a ServerFailedError. Knows no benchmark and no API beyond the path that says
that it is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import psutil

from kvboost.bench.stream_client import Address, ask

HOST = "127.0.0.1"
_LAST_WORDS = 300  # characters of a dead server's log
_POLL_S = 0.2


class ServerFailedError(Exception):
    """A server that does not come up or does not go on; the message is the reason."""


class ServerProcess:
    """A process that listens on a free port, which is put in place of `{port}` in its command."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        ready_path: str = "/health",
        environment: dict[str, str] | None = None,
        folder: Path | None = None,
        port: int | None = None,
    ) -> None:
        self.address = Address(HOST, port or free_port())
        self.command = [part.replace("{port}", str(self.address.port)) for part in command]
        self._ready_path = ready_path
        self._log: IO[str] = tempfile.TemporaryFile("a+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._said = ""
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=inherited | (environment or {}),
            start_new_session=True,  # so that it goes with all its children
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def rss_bytes(self) -> int:
        """Memory that the process holds now."""
        return int(psutil.Process(self.pid).memory_info().rss)

    @property
    def log(self) -> str:
        """All it has printed."""
        if not self._log.closed:
            self._log.seek(0)  # it goes on writing at the end
            self._said = self._log.read()
        return self._said

    async def wait_until_ready(self, deadline_s: float) -> float:
        """Wait until it says that it is ready; returns after how many seconds."""
        started = time.monotonic()
        while True:
            reply = await ask(self.address, self._ready_path)
            waited_s = time.monotonic() - started
            if reply.status == 200:
                return waited_s
            if not self.is_running:
                raise ServerFailedError(f"ended with exit code {self._process.poll()}{self._last_words()}")
            if waited_s > deadline_s:
                raise ServerFailedError(f"not ready in {deadline_s:g} s{self._last_words()}")
            await asyncio.sleep(_POLL_S)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self, timeout_s: float) -> int:
        """Its exit code, once it has ended."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ServerFailedError(f"still runs after {timeout_s:g} s{self._last_words()}") from None

    def stop(self, timeout_s: float = 30.0) -> None:
        """Ask it to end, and see that it does. It can be called twice."""
        if self.is_running:
            self.signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
        self.kill()
        self._said = self.log
        self._log.close()

    def kill(self) -> None:
        """End it at once, with all its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def _last_words(self) -> str:
        lines = [line.strip() for line in self.log.splitlines() if line.strip()]
        return f" ({lines[-1][:_LAST_WORDS]})" if lines else ""


def free_port() -> int:
    """A port nobody listens on at this moment."""
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])
