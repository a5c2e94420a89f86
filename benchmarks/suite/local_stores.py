"""A Redis and an S3 server on loopback, for `make bench`: starts each, runs a command on it, and ends it.

`python -m benchmarks.suite.local_stores COMMAND...` runs COMMAND with --address and --server added, once per
store. One that is not installed is left out, and that is said. Knows servers, no benchmark.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

HOST = "127.0.0.1"
_READY_S = 30.0
_BUCKET = "kvboost-bench"
_AWS = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench", "AWS_REGION": "us-east-1"}


class Store(NamedTuple):
    """A server that runs."""

    address: str
    server: str


@contextmanager
def redis_store(folder: Path) -> Iterator[Store]:
    """Debian's redis-server, or whatever else is called so."""
    port = _free_port()
    limits = ("--maxmemory", "8gb", "--maxmemory-policy", "allkeys-lru", "--save", "")
    command = ["redis-server", "--port", str(port), "--bind", HOST, "--dir", str(folder), *limits]
    said = subprocess.run(["redis-server", "--version"], capture_output=True, text=True, check=True).stdout
    number = next(word.removeprefix("v=") for word in said.split() if word.startswith("v="))
    with _running(command, port):
        yield Store(f"redis://{HOST}:{port}", f"Redis {number}")


@contextmanager
def s3_store(_folder: Path) -> Iterator[Store]:
    """moto's S3 with a bucket."""
    port = _free_port()
    endpoint = f"http://{HOST}:{port}"
    with _running([sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(port)], port):
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{_BUCKET}", method="PUT")).close()
        yield Store(f"s3://{_BUCKET}/cache?endpoint={endpoint}", f"moto {version('moto')}")


@contextmanager
def _running(command: list[str], port: int) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(port, process)
        yield
    finally:
        process.terminate()
        process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + _READY_S
    while not _answers(port):
        if time.monotonic() > until or process.poll() is not None:
            raise SystemExit(f"{process.args!r} does not answer")
        time.sleep(0.05)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def main(command: list[str]) -> int:
    """Run `command` on every store that is installed; the worst of its exit codes."""
    os.environ.update(_AWS)
    stores: dict[str, tuple[bool, Callable[[Path], AbstractContextManager[Store]]]] = {
        "redis-server": (shutil.which("redis-server") is not None, redis_store),
        "moto": (importlib.util.find_spec("moto") is not None, s3_store),
    }
    worst = 0
    for name, (is_there, start) in stores.items():
        if not is_there:
            sys.stderr.write(f"{name} is not installed: left out\n")
            continue
        with tempfile.TemporaryDirectory() as folder, start(Path(folder)) as store:
            given = ["--address", store.address, "--server", store.server]
            worst = max(worst, subprocess.run([*command, *given]).returncode)
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
