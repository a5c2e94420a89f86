"""JSON lines between the benchmark and a peer: one request per line on stdin, one reply per line on stdout.

Requests are `{"op": ..., ...}` with an operation of `Peer`; a reply is a JSON object, `{"error": ...}`
where the operation failed. Whatever else the peer's libraries print goes to stderr. Runs in the peer's
own environment, so it needs the standard library only.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time
import traceback
from array import array
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any


class Peer:
    """What the benchmark asks of a peer. Prompts come as token ids and as the text they stand for."""

    def load(self, model: str, gguf: str | None, context_tokens: int, threads: int) -> dict[str, Any]:
        """Load the model (a Hugging Face folder, or the GGUF file it was made from) and describe oneself."""
        raise NotImplementedError

    def warm(self, token_ids: list[int], text: str) -> dict[str, Any]:
        """Read a text that later prompts begin with, or contain."""
        raise NotImplementedError

    def settle(self) -> dict[str, Any]:
        """Get ready for the next answer, outside the clock."""
        return {}

    def answer(self, token_ids: list[int], text: str, new_tokens: int, distribution: bool) -> dict[str, Any]:
        """Continue greedily by `new_tokens`; with `distribution` the reply has the first token's logits."""
        raise NotImplementedError

    def close(self) -> dict[str, Any]:
        """The last request."""
        return {}


class Clock:
    """Wall time since it was made, in milliseconds, at every token."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self.times_ms: list[float] = []

    def token(self) -> None:
        self.times_ms.append((time.perf_counter() - self._started) * 1e3)


def answered(
    clock: Clock, *, token_ids: list[int] | None = None, text: str | None = None, **more: Any
) -> dict[str, Any]:
    """A reply to `answer`: times, what was said as ids or as text, and what else the peer knows."""
    times = clock.times_ms
    return {"ttft_ms": times[0], "total_ms": times[-1], "token_ids": token_ids, "text": text, **more}


def packed(logits: Iterable[float]) -> str:
    """Logits or log-probabilities of the whole vocabulary as base64 of little-endian float32."""
    numbers = array("f", logits)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode("ascii")


def versions(*distributions: str) -> dict[str, str]:
    """Installed versions, and Python's."""
    python = ".".join(map(str, sys.version_info[:3]))
    return {"python": python, **{name: version(name) for name in distributions}}


def serve(peer: Peer) -> None:
    """Answer requests until `close` or the end of stdin."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        request = json.loads(line)
        operation = request.pop("op")
        try:
            reply = getattr(peer, operation)(**request)
        except Exception as error:  # whatever a peer raises is its answer
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
        if operation == "close":
            break
