"""The end of a server: what runs is finished or told, what comes is refused, what was read is on disk."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvboost import KVBoost
from tests.fixture_types import MakeEngine
from tests.server.running import HELLO, Serve, events_of, wait_for
from tests.tiny_models import random_ids, tiny_model, tiny_tokenizer

CHAT: dict[str, Any] = {"model": "tiny", "messages": HELLO, "temperature": 0}


# --- in this process -------------------------------------------------------------------------


@pytest.mark.parametrize("batching", [True, False])
def test_what_runs_is_finished_and_what_comes_is_refused(
    make_slow_engine: MakeEngine, serve: Serve, batching: bool
) -> None:
    server = serve(make_slow_engine(0.02), batching=batching, shutdown_timeout_s=30)
    with ThreadPoolExecutor(2) as pool:
        whole = pool.submit(server.chat, max_tokens=30, temperature=0)
        chunks = pool.submit(server.chat_chunks, max_tokens=30, temperature=0)
        server.until(lambda stats: stats["running"] + stats["waiting"] == 2)
        with httpx.Client(base_url=server.url) as late:
            assert late.get("/ready").status_code == 200
            server.server.stop()
            wait_for(lambda: late.get("/ready").status_code == 503)
            refused = late.post("/v1/chat/completions", json=CHAT)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            assert late.get("/health").status_code == 200
        assert whole.result()["usage"]["completion_tokens"] == 30
        assert len(chunks.result()) > 20
    wait_for(lambda: not server.service.worker.is_alive)
    with pytest.raises(httpx.ConnectError):
        wait_for(lambda: httpx.get(f"{server.url}/health") is None)


@pytest.mark.parametrize("batching", [True, False])
def test_what_is_not_finished_in_time_is_told(
    make_slow_engine: MakeEngine, serve: Serve, batching: bool
) -> None:
    server = serve(make_slow_engine(0.02), batching=batching, shutdown_timeout_s=0.1, max_sequences=2)
    body = {**CHAT, "max_tokens": 900}
    with ThreadPoolExecutor(3) as pool:
        post = server.client.post
        stream = pool.submit(post, "/v1/chat/completions", json={**body, "stream": True})
        server.until(lambda stats: stats["running"] == 1)
        others = [pool.submit(post, "/v1/chat/completions", json=body) for _ in range(2)]
        server.until(lambda stats: stats["running"] + stats["waiting"] == 3)
        time.sleep(0.2)
        server.server.stop()
        for other in others:
            response = other.result(timeout=10)
            assert (response.status_code, response.json()["error"]["code"]) == (503, "shutting_down")
        *chunks, last = events_of(stream.result(timeout=10).text)
        assert chunks
        assert json.loads(last)["error"]["code"] == "shutting_down"


def test_a_second_signal_hurries(make_slow_engine: MakeEngine, serve: Serve) -> None:
    server = serve(make_slow_engine(0.05), shutdown_timeout_s=600)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.client.post, "/v1/chat/completions", json={**CHAT, "max_tokens": 900})
        server.until(lambda stats: stats["running"] == 1)
        server.server.handle_exit(signal.SIGTERM, None)
        time.sleep(0.3)
        assert not answer.done()
        server.server.handle_exit(signal.SIGTERM, None)
        assert answer.result(timeout=10).status_code == 503


# --- as a process ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("models") / "tiny"
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


class Process:
    """`kvboost serve`, from its first words to its last."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-c", "from kvboost.cli.main import main; main()", "serve", *arguments]
        self._process = subprocess.Popen(
            [*command, "--port", "0"],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        wait_for(lambda: self.url is not None or self._process.poll() is not None, within_s=120)
        assert self.url is not None, self.said

    def _read(self) -> None:
        assert self._process.stderr is not None
        self.said.extend(self._process.stderr)

    @property
    def url(self) -> str | None:
        found = re.search(r"served at (http://127.0.0.1:\d+)/v1, the page is \1/", "".join(self.said))
        return found[1] if found else None

    def ended(self) -> int:
        """Wait for the end; returns the exit status."""
        status = self._process.wait(60)
        self._reader.join()
        return status

    def send(self, number: int) -> None:
        self._process.send_signal(number)


@contextlib.contextmanager
def process(*arguments: str) -> Iterator[Process]:
    running = Process(*arguments)
    try:
        yield running
    finally:
        running._process.kill()
        running.ended()
        assert running._process.stderr is not None
        running._process.stderr.close()


def test_signals_and_the_disk(folder: Path, tmp_path: Path) -> None:
    flags = (str(folder), "--chunk-size", "16", "--disk-cache-dir", str(tmp_path / "kv"))
    prompt = random_ids(100, 1)
    body = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 150}
    with process(*flags) as first, ThreadPoolExecutor(4) as pool:
        asked = [
            pool.submit(httpx.post, f"{first.url}/v1/completions", json=body, timeout=60) for _ in range(3)
        ]
        with httpx.stream("POST", f"{first.url}/v1/completions", json={**body, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            first.send(signal.SIGTERM)
            rest = "".join(lines)
        answers = [future.result() for future in asked]
        assert [answer.status_code for answer in answers] == [200] * 3
        assert {answer.json()["usage"]["completion_tokens"] for answer in answers} == {150}
        assert rest.endswith("data: [DONE]")
        assert first.ended() == 0
    said = "".join(first.said)
    assert said.rstrip().endswith("ended")
    assert "Traceback" not in said
    assert "POST /v1/completions 200" in said
    with process(*flags) as second:
        warm = httpx.post(f"{second.url}/v1/completions", json=body, timeout=60).json()
        assert warm["kvboost"]["cached_tokens"] == len(prompt) - 1, "found on disk"
        assert warm["choices"][0]["text"] == answers[0].json()["choices"][0]["text"]
        new = {**body, "prompt": random_ids(100, 2), "max_tokens": 2}
        httpx.post(f"{second.url}/v1/completions", json=new, timeout=60)
        stats = f"{second.url}/v1/cache/stats"
        wait_for(lambda: httpx.get(stats).json()["cache"]["disk"]["unsaved_chunks"] == 0)
        second.send(signal.SIGKILL)
        assert second.ended() == -signal.SIGKILL
    with KVBoost.from_pretrained(str(folder), chunk_size=16, disk_cache_dir=tmp_path / "kv") as engine:
        for known in (prompt, new["prompt"]):
            assert engine.generate(known, 1).cached_tokens == 99, "kill -9 loses nothing that was saved"
        engine.cache_manager.check_integrity()
