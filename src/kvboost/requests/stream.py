"""An answer as an iterable of text pieces, produced by a thread of its own.

Knows nothing of the engine but the function that serves the request.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from transformers import TextStreamer

from kvboost.models import GenerationResult


class _QueueStreamer(TextStreamer):
    """Puts finished pieces of text into a queue instead of printing them."""

    def __init__(self, tokenizer: Any, pieces: queue.SimpleQueue[str | None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._pieces = pieces

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._pieces.put(text)


class TextStream:
    """Iterate for the pieces; `result` is there when it is through; `close` stops early.

    The model works ahead of the reader, so a slow reader holds nobody up.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.streamer = _QueueStreamer(tokenizer, self._pieces)
        self._thread: threading.Thread | None = None
        self._cancelled = threading.Event()
        self._result: GenerationResult | None = None
        self._error: BaseException | None = None
        self._ended = False
        self._tell: Callable[[GenerationResult], object] | None = None

    def start(
        self,
        serve: Callable[[], GenerationResult],
        cancelled: threading.Event,
        tell: Callable[[GenerationResult], object] | None = None,
    ) -> None:
        """Serve the request in a thread; setting `cancelled` ends it at the next token.

        When it is through, `tell` hears of the result, once, in the thread of whoever reads the stream.
        """
        self._cancelled, self._tell = cancelled, tell
        self._thread = threading.Thread(target=self._work, args=(serve,), name="kvboost-stream", daemon=True)
        self._thread.start()

    def _work(self, serve: Callable[[], GenerationResult]) -> None:
        try:
            self._result = serve()
        except BaseException as error:  # handed to the reader, whose thread it belongs to
            self._error = error
        finally:
            self._pieces.put(None)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        piece = None if self._ended else self._pieces.get()
        if piece is None:
            self._ended = True
            self._join()
            self._tell_once()
            raise StopIteration
        return piece

    @property
    def result(self) -> GenerationResult:
        """The whole answer; waits for it where it is not there yet."""
        self._join()
        if self._result is None:
            raise RuntimeError("the stream was not started")
        self._tell_once()
        return self._result

    def _tell_once(self) -> None:
        """Whatever comes of telling, text and result stay."""
        tell, self._tell = self._tell, None
        if tell is not None and self._result is not None:
            tell(self._result)

    def close(self) -> None:
        """Stop at the next token and release everything. It can be called twice."""
        self._cancelled.set()
        self._ended = True
        self._join()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def __enter__(self) -> TextStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
