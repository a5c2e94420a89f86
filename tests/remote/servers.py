"""Redis and S3 servers on loopback, each in a process of its own: started, paused, killed, started again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

HOST = "127.0.0.1"
REDIS = shutil.which("redis-server")
_READY_S = 30.0
_SLOTS = 16_384


def free_port() -> int:
    """A port that nobody listens on, nor on the one of a cluster's own talk (10,000 above)."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind((HOST, 0))
            port = int(first.getsockname()[1])
            if port >= 55_000:
                continue
            try:
                second.bind((HOST, port + 10_000))
            except OSError:
                continue
            return port


def need_redis() -> None:
    """Skip the test where there is no redis-server."""
    if REDIS is None:
        pytest.skip("redis-server is not installed (Debian: apt install redis-server)")
    pytest.importorskip("redis", reason="redis-py is not installed (extra `redis`)")


def need_s3() -> None:
    """Skip the test where there is no S3 server or no client."""
    pytest.importorskip("obstore", reason="obstore is not installed (extra `s3`)")
    pytest.importorskip("moto", reason="moto is not installed (pip install 'moto[server]')")


class RedisServer:
    """One redis-server. `options` are lines of its configuration."""

    def __init__(self, folder: Path, *options: str, password: str = "", tls: Path | None = None) -> None:
        self.port = free_port()
        self.folder = folder
        self.password = password
        self._tls = tls
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self.start()

    @property
    def url(self) -> str:
        scheme = "redis" if self._tls is None else "rediss"
        more = "" if self._tls is None else f"?ssl_ca_certs={self._tls / 'ca.crt'}"
        return f"{scheme}://{f':{self.password}@' if self.password else ''}{HOST}:{self.port}{more}"

    @property
    def socket_url(self) -> str:
        return f"unix://{self.folder / 'redis.sock'}"

    def _command(self) -> list[str]:
        port = ["--port", str(self.port)]
        if self._tls is not None:
            port = ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no"]
            for name in ("cert", "key"):
                port += [f"--tls-{name}-file", str(self._tls / f"server.{name}")]
        command = [str(REDIS), *port, "--bind", HOST, "--dir", str(self.folder), "--save", ""]
        command += ["--appendonly", "no", "--unixsocket", str(self.folder / "redis.sock")]
        for line in (*self._options, *([f"requirepass {self.password}"] if self.password else [])):
            name, _, value = line.partition(" ")
            command += [f"--{name}", *value.split()]
        return command

    def start(self) -> None:
        """Start it, empty, and wait until it answers."""
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(self._command(), stdout=log, stderr=log)
        until = time.monotonic() + _READY_S
        while not self._answers():
            assert self._process.poll() is None, (self.folder / "log").read_text()[-2000:]
            assert time.monotonic() < until, "redis-server does not answer"
            time.sleep(0.02)

    def _answers(self) -> bool:
        import redis

        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def client(self) -> Any:
        """An administrator's connection."""
        import redis

        return redis.Redis.from_url(self.url, socket_timeout=10.0)

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def pause(self) -> None:
        """From now on it takes connections (the system does) and answers nothing."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """kill -9: what it held is lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def values(self) -> dict[str, bytes]:
        """All that it holds."""
        with self.client() as client:
            names = [name for name in client.scan_iter(count=1000) if not name.endswith(b":claim")]
            found = [client.get(name) for name in names]  # in a cluster, names have slots of their own
        return {name.decode(): value for name, value in zip(names, found, strict=True) if value is not None}


class RedisCluster:
    """Three nodes that share the slots."""

    def __init__(self, folder: Path) -> None:
        timeout = "cluster-node-timeout 2000"
        self.nodes = [
            RedisServer(folder / str(number), "cluster-enabled yes", timeout) for number in range(3)
        ]
        self._owners: dict[int, int] = {}  # of slots that were moved
        self._join()

    @property
    def url(self) -> str:
        return f"redis+cluster://{HOST}:{self.nodes[0].port}"

    def _join(self) -> None:
        bounds = [_SLOTS * number // 3 for number in range(4)]
        for number, node in enumerate(self.nodes):
            with node.client() as client:
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1)
                client.execute_command("CLUSTER", "MEET", HOST, self.nodes[0].port)
        until = time.monotonic() + _READY_S
        while not all(self._is_whole(node) for node in self.nodes):
            assert time.monotonic() < until, "the cluster does not come up"
            time.sleep(0.05)

    @staticmethod
    def _is_whole(node: RedisServer) -> bool:
        with node.client() as client:
            info = client.cluster("INFO")
        wanted = {"cluster_state": "ok", "cluster_known_nodes": "3", "cluster_slots_ok": str(_SLOTS)}
        return all(info[name] == value for name, value in wanted.items())

    def move_slots(self, names: Sequence[str]) -> int:
        """Move the slots of these names to the next node, with all that is in them; how many."""
        import redis.crc

        slots = sorted({redis.crc.key_slot(name.encode()) for name in names})
        clients = [node.client() for node in self.nodes]
        ids = [self._id_of(client) for client in clients]
        for slot in slots:
            first = next(n for n in range(3) if _SLOTS * n // 3 <= slot < _SLOTS * (n + 1) // 3)
            owner = self._owners.get(slot, first)
            taker = self._owners[slot] = (owner + 1) % 3
            clients[taker].execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[owner])
            clients[owner].execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[taker])
            while keys := clients[owner].execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100):
                port = self.nodes[taker].port
                clients[owner].execute_command("MIGRATE", HOST, port, "", 0, 5000, "KEYS", *keys)
            for client in (clients[taker], clients[owner]):
                client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[taker])
        for client in clients:
            client.close()
        return len(slots)

    @staticmethod
    def _id_of(client: Any) -> str:
        found = client.execute_command("CLUSTER", "MYID")
        return found.decode() if isinstance(found, bytes) else str(found)

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()


class S3Server:
    """moto's S3, with a bucket."""

    bucket = "kvboost-tests"

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(self.port)]
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        self._wait(folder / "log")
        self._put(f"/{self.bucket}")

    @property
    def endpoint(self) -> str:
        return f"http://{HOST}:{self.port}"

    def url(self, prefix: str = "") -> str:
        return f"s3://{self.bucket}{f'/{prefix}' if prefix else ''}?endpoint={self.endpoint}"

    def _wait(self, log: Path) -> None:
        until = time.monotonic() + _READY_S
        while not self._answers():
            assert self._process.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < until, "moto's server does not answer"
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.endpoint}/moto-api/data.json", timeout=5) as answer:
                return bool(json.load(answer) is not None)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def _put(self, path: str) -> None:
        request = urllib.request.Request(self.endpoint + path, method="PUT")
        request.add_header("Host", f"{HOST}:{self.port}")
        with urllib.request.urlopen(request, timeout=10):
            pass

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


AWS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}


def certificates(folder: Path) -> Path:
    """A folder with a certificate for 127.0.0.1 and the authority that signed it; skips without openssl."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    folder.mkdir(parents=True, exist_ok=True)

    def run(*arguments: str) -> None:
        subprocess.run([openssl, *arguments], cwd=folder, check=True, capture_output=True)

    new = ("-newkey", "rsa:2048", "-nodes")
    ca = ("-addext", "basicConstraints=critical,CA:TRUE")
    run("req", "-x509", *new, "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=test ca", *ca)
    run("req", *new, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=127.0.0.1")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    signed = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
    run("x509", "-req", "-in", "server.csr", *signed, "-out", "server.cert")
    return folder


def environment(home: Path) -> dict[str, str]:
    """For a process that stands for another machine: a home of its own."""
    home.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "HF_HOME"))}
    root = Path(__file__).parents[2]
    paths = os.pathsep.join(each for each in (str(root), os.environ.get("PYTHONPATH", "")) if each)
    return {
        **kept,
        **AWS,
        "HOME": str(home),
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
