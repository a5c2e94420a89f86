"""The process of one side, as seen from outside: started with its own code, asked for records, ended.

Knows the lines that are exchanged, not what is measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .checkouts import Checkout

WORKER = Path(__file__).with_name("worker.py")
_PATIENCE_S = 5
_LOG_CHARACTERS = 4_000


class SideError(Exception):
    """A side could not be started or could not measure."""


class Side:
    """A worker process that has imported the kvboost of one checkout. Only one of two works at a time.

    Between two questions it stands still, whatever its threads would do.
    """

    def __init__(self, checkout: Checkout, arguments: Sequence[str]) -> None:
        self.checkout = checkout
        self._log = tempfile.TemporaryFile("a+", errors="replace")  # noqa: SIM115 (closed with the process)
        inherited = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout.source), *inherited])},
            start_new_session=True,  # Ctrl-C is ours to answer, and its children end with it
        )

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def check_import(self) -> Path:
        """Where its kvboost comes from; an error if that is not its checkout."""
        imported = Path(self._reply()["imported"]).resolve()
        if not imported.is_relative_to(self.checkout.source.resolve()):
            raise SideError(
                f"{self._name}: kvboost was imported from {imported.parent}, expected one below "
                f"{self.checkout.source}"
            )
        return imported

    def prepare(self) -> None:
        """Let it import the benchmark and load what is loaded once."""
        self._ask()

    def measure(self) -> dict[str, Any]:
        """One record."""
        record: dict[str, Any] = self._ask()["record"]
        return record

    def close(self) -> None:
        """End the process and its children."""
        if self._process.poll() is None:
            self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_PATIENCE_S)
        self._signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def log(self) -> str:
        """The end of what it and its libraries wrote to stderr."""
        self._log.seek(0)
        return self._log.read()[-_LOG_CHARACTERS:]

    @property
    def _name(self) -> str:
        return f"{self.checkout.side.upper()} ({self.checkout.given})"

    def _ask(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):  # it has ended: the missing reply says so
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        reply = self._reply()
        self._signal(signal.SIGSTOP)
        return reply

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            last = (self.log().strip().splitlines() or ["it said nothing"])[-1]
            raise SideError(f"{self._name}: its process ended with status {self._process.wait()}: {last}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise SideError(f"{self._name}: {reply['error']}")
        return reply

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)
