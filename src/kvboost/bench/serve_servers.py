"""Who takes part in `bench serve`, and a server in a process of its own: started, waited for, watched, ended.

Servers of transformers are in an environment that `make peers` makes. All that can go wrong with a process is
a ServerFailedError; of its API only the path is known that says that it is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil
import torch
from transformers import AutoTokenizer

from kvboost.bench.stream_client import Address, ask
from kvboost.loading.embedded import BUILTIN_NAME, ensure_checkpoint
from kvboost.loading.random_models import byte_tokenizer, is_random

HTTP_PEER = "transformers_serve"  # its folder among the peers of `make peers`
KVBOOST, ALONE, PAGED, PLAIN = "kvboost", "no_batching", "transformers_cb", "transformers"
LABELS = {
    KVBOOST: "kvboost serve",
    ALONE: "  --no-batching",
    PAGED: "transformers serve, continuous batching",
    PLAIN: "transformers serve",
}
KVBOOST_COMMAND = (sys.executable, "-c", "from kvboost.cli.main import main; main()")
PAGED_FLAGS = ("--continuous-batching",)
# What it runs best with on a CPU, tried with this workload.
PAGED_CPU_FLAGS = (
    "--cb-max-memory-percent",
    "0.3",
    "--cb-max-batch-tokens",
    "512",
    "--cb-num-blocks",
    "64",
    "--no-cb-use-cuda-graph",
)
HOST = "127.0.0.1"
_LAST_WORDS = 300  # characters of a dead server's log
_POLL_S = 0.2


@dataclass(frozen=True)
class Contestant:
    """How a server is started, and what it calls the model."""

    name: str
    command: tuple[str, ...]
    model: str
    ready_path: str
    environment: dict[str, str]
    folder: Path | None = None


def contestants(
    model: str, device: str, dtype: str, flags: tuple[str, ...], peer: Path
) -> dict[str, Contestant]:
    """All that could take part, ours with `flags`; those of transformers only where `peer` is set up."""
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "HF_HUB_OFFLINE": "1"}
    same = ("--port", "{port}", "--device", device, "--dtype", dtype)
    found = {
        name: Contestant(
            name, (*KVBOOST_COMMAND, "serve", model, *same, *flags, *more), model, "/ready", threads
        )
        for name, more in ((KVBOOST, ()), (ALONE, ("--no-batching",)))
    }
    if not reason_not_there(peer, model):
        about = json.loads((peer / "peer.json").read_text())
        checkpoint = checkpoint_of(model)
        theirs = (str(peer / about["python"]), *about["serve"], checkpoint, *same)
        environment = {**threads, "PYTHONNOUSERSITE": "1", **about.get("environment", {})}
        paged = PAGED_FLAGS if device != "cpu" else (*PAGED_FLAGS, *PAGED_CPU_FLAGS)
        for name, more in ((PAGED, paged), (PLAIN, ())):
            command = (*theirs, "--host", "127.0.0.1", *more)
            found[name] = Contestant(name, command, checkpoint, "/health", environment, peer)
    return found


def checkpoint_of(model: str) -> str:
    """The model as transformers loads it."""
    return str(ensure_checkpoint()) if model == BUILTIN_NAME else model


def tokenizer_of(model: str) -> Any:
    """The model's tokenizer."""
    return byte_tokenizer() if is_random(model) else AutoTokenizer.from_pretrained(checkpoint_of(model))


def reason_not_there(folder: Path, model: str = "") -> str | None:
    """Why the peer in `folder` cannot be started, with a model; None where it can."""
    if is_random(model):
        return f"it cannot load {model}, which is made in memory"
    if (folder / "peer.json").is_file():
        return None
    note = folder / "unavailable.txt"
    return " ".join(note.read_text().split()) if note.is_file() else "not set up; run make peers"


# --- a process -------------------------------------------------------------------------------------


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
