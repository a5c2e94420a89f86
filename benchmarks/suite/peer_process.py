"""Another engine in a process of its own interpreter, asked over JSON lines (`benchmarks/peers/protocol.py`).

All that can go wrong with it is a PeerFailedError; past a deadline it is killed. Knows no benchmark.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import torch

_LAST_WORDS = 300  # characters of a dead peer's log
_CLOSING_S = 10.0


@dataclass(frozen=True)
class Turn:
    """What came of one prompt. A peer without token ids gives its text."""

    ttft_ms: float
    decode_tokens_per_s: float | None
    token_ids: list[int] | None
    text: str | None = None
    reused_tokens: int | None = None
    reported_ttft_ms: float | None = None  # what the peer itself calls the time to the first token
    logits: torch.Tensor | None = None  # of the first token, `[vocab]`


class Participant(Protocol):
    """Answers prompts, here or in another process."""

    name: str

    def turn(self, prompt: list[int], new_tokens: int, *, distribution: bool = False) -> Turn:
        """Continue `prompt` greedily by exactly `new_tokens`."""


class PeerFailedError(Exception):
    """A peer that cannot go on; the message is the reason."""


class PeerProcess:
    """A peer's process. All that can go wrong with it is a PeerFailedError; past a deadline it is killed."""

    def __init__(self, folder: Path, tokenizer: Any, *, threads: int, deadline_s: float) -> None:
        """Start what `folder/peer.json` names: its label, interpreter, worker script and environment."""
        found = json.loads((folder / "peer.json").read_text())
        self.name = folder.name
        self.label: str = found["label"]
        self.description: dict[str, Any] = {}
        self._tokenizer = tokenizer
        self._threads = threads
        self._deadline_s = deadline_s
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONNOUSERSITE": "1"}
        self._log: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [folder / found["python"], folder / found["worker"]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=folder,
            env=environment | found.get("environment", {}),
            start_new_session=True,  # so that it goes with all its children
        )
        self._replies: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def load(self, model: str, gguf: str | None, context_tokens: int) -> None:
        """Let it load the model; `description` is what it says about itself."""
        started = time.perf_counter()
        self.description = self._ask(
            "load", model=model, gguf=gguf, context_tokens=context_tokens, threads=self._threads
        )
        self.description["load_s"] = round(time.perf_counter() - started, 1)

    def warm(self, token_ids: list[int]) -> None:
        self._ask("warm", token_ids=token_ids, text=self._tokenizer.decode(token_ids))

    def turn(self, prompt: list[int], new_tokens: int, *, distribution: bool = False) -> Turn:
        text = self._tokenizer.decode(prompt)
        self._ask("settle")
        said = self._ask(
            "answer", token_ids=prompt, text=text, new_tokens=new_tokens, distribution=distribution
        )
        decoding_ms = said["total_ms"] - said["ttft_ms"]
        packed = said.get("logits")
        return Turn(
            ttft_ms=said["ttft_ms"],
            decode_tokens_per_s=(new_tokens - 1) * 1e3 / decoding_ms if decoding_ms > 0 else None,
            token_ids=said.get("token_ids"),
            text=said.get("text"),
            reused_tokens=said.get("reused_tokens"),
            reported_ttft_ms=said.get("reported_ttft_ms"),
            logits=_unpacked(packed) if packed else None,
        )

    def close(self) -> None:
        """Ask it to end, and see that it does."""
        with contextlib.suppress(PeerFailedError):
            if self._process.poll() is None:
                self._ask("close", deadline_s=_CLOSING_S)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_CLOSING_S)
        self._kill()
        self._log.close()

    def _ask(self, operation: str, *, deadline_s: float | None = None, **values: Any) -> dict[str, Any]:
        """Send a request and wait for its reply."""
        deadline_s = deadline_s or self._deadline_s
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": operation, **values}) + "\n")
            self._process.stdin.flush()
            line = self._replies.get(timeout=deadline_s)
        except (OSError, ValueError):  # a broken pipe, or one that was closed when it was killed
            line = ""
        except queue.Empty:
            self._kill()
            raise PeerFailedError(f"{operation}: no reply in {deadline_s:g} s") from None
        if not line:
            code = self._process.wait()
            raise PeerFailedError(f"{operation}: ended with exit code {code}{self._last_words()}")
        try:
            reply: dict[str, Any] = json.loads(line)
        except ValueError:
            self._kill()
            raise PeerFailedError(f"{operation}: a reply that is no JSON: {line[:80]!r}") from None
        if "error" in reply:
            raise PeerFailedError(f"{operation}: {' '.join(reply['error'].split())}"[:_LAST_WORDS])
        return reply

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._replies.put(line)
        self._replies.put("")

    def _last_words(self) -> str:
        """The last line of its log."""
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        return f" ({lines[-1][:_LAST_WORDS]})" if lines else ""

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def _unpacked(packed: str) -> torch.Tensor:
    """`[vocab]` from base64 of little-endian float32."""
    return torch.from_numpy(np.frombuffer(base64.b64decode(packed), dtype="<f4").astype(np.float32))
