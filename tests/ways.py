"""Which files of kvboost a request passes on its way to the first token, and the calls between them.

A hop is a call from a function in one file to a function in another; each counts once, however often it is
made. Tensors (`kv/`) and kernels (`kernels/`) are not counted. Recorded by `sys.setprofile`.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import pytest

import kvboost
from kvboost import KVBoost
from tests.engine.reuse_checks import pay_always
from tests.reuse_warnings import approximate_reuse_expected
from tests.tiny_models import random_ids, tiny_model, tiny_tokenizer

SOURCE = f"{Path(kvboost.__file__).parent}/"
NOT_COUNTED = ("kv/", "kernels/")
ELSEWHERE = ("kvboost-weights", "kvboost-saver")  # threads that work beside the requests


class Hop(NamedTuple):
    """A call from `caller` in the file `source` to `called` in the file `target`."""

    source: str
    caller: str
    target: str
    called: str


class Way:
    """What was passed so far; `last` is the function (file and name) at which it ends."""

    def __init__(self, last: tuple[str, str]) -> None:
        self.files: dict[str, None] = {}
        self.hops: dict[Hop, None] = {}
        self.is_on = False
        self._last = last

    def note(self, frame: FrameType, event: str, _argument: Any) -> None:
        """The profile function."""
        if not self.is_on or event != "call":
            return
        target = file_of(frame.f_code)
        if not target or threading.current_thread().name in ELSEWHERE:
            return
        if (target, frame.f_code.co_name) == self._last:
            self.is_on = False
            return
        self.files.setdefault(target)
        caller = frame.f_back
        while caller is not None and not file_of(caller.f_code):
            caller = caller.f_back  # through transformers, or a context manager of Python's own
        if caller is not None and (source := file_of(caller.f_code)) != target:
            self.hops.setdefault(Hop(source, name_of(caller.f_code), target, name_of(frame.f_code)))

    @contextlib.contextmanager
    def in_new_threads(self) -> Iterator[None]:
        """Inside, threads that start are recorded."""
        threading.setprofile(self.note)
        try:
            yield
        finally:
            threading.setprofile(None)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def in_this_thread(self) -> Iterator[None]:
        """Inside, it is recorded, up to the first token."""
        before = sys.getprofile()
        with no_garbage_collection():
            self.is_on = True
            sys.setprofile(self.note)
            try:
                yield
            finally:
                sys.setprofile(before)
        assert not self.is_on, "there was no first token"


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Inside, no engine of an earlier test is finalized: its calls are not on the way."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def file_of(code: CodeType) -> str:
    """A file of kvboost as the documentation names it; empty where it is none that counts."""
    path = code.co_filename
    if not path.startswith(SOURCE) or path[len(SOURCE) :].startswith(NOT_COUNTED):
        return ""
    return path[len(SOURCE) :].removesuffix(".py")


def name_of(code: CodeType) -> str:
    """A function as it is called in its file."""
    return str(getattr(code, "co_qualname", code.co_name)).replace("<locals>.", "")


# --- three requests ------------------------------------------------------------------------------


def warm_generate() -> Way:
    """A greedy `generate` whose beginning is cached."""
    engine, start = _engine(), random_ids(150, seed=1)
    for prompt in ([*start, *random_ids(10, seed=2)], random_ids(100, seed=3)):
        engine.generate(prompt, 4, mode="prefix_cache")
    way = Way(("run/decode", "__call__"))
    with way.in_this_thread():
        engine.generate([*start, *random_ids(10, seed=4)], 4, mode="prefix_cache")
    return way


def rag_generate() -> Way:
    """A `generate` over documents that were read before, in another order."""
    engine, documents = _engine(), [random_ids(96, seed=10 + number) for number in range(3)]
    for document in documents:
        engine.warm(document)
    way = Way(("run/decode", "__call__"))
    with pytest.MonkeyPatch.context() as patch, approximate_reuse_expected(), way.in_this_thread():
        pay_always(patch)
        prompt = [*random_ids(9, seed=30), *documents[2], *documents[0], *random_ids(8, seed=4)]
        assert engine.generate(prompt, 4).recomputed_tokens
    return way


def served() -> Way:
    """A chat over HTTP, streamed, whose beginning is cached."""
    from tests.server.running import running

    way = Way(("server/tickets", "token"))
    with way.in_new_threads(), running(_engine()) as server:
        model = server.client.get("/v1/models").json()["data"][0]["id"]

        def ask(question: str) -> None:
            messages = [
                {"role": "system", "content": "be brief, " * 20},
                {"role": "user", "content": question},
            ]
            body = {"model": model, "messages": messages, "max_tokens": 3, "stream": True}
            server.client.post("/v1/chat/completions", json=body).raise_for_status()

        for question in ("one", "two"):
            ask(question)
        server.service.worker.call(lambda: None).result()  # the step before it is over, and all is stored
        while _counted(server.service) < 3:  # a request is counted after its client has the answer
            time.sleep(0.01)
        time.sleep(0.1)  # and logged
        with no_garbage_collection():
            way.is_on = True
            ask("three")
        assert not way.is_on
    return way


def _counted(service: Any) -> int:
    """How many requests are over."""
    lines = service.metrics.text().decode().splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("kvboost_requests_total"))


def _engine() -> KVBoost:
    return KVBoost(tiny_model("llama"), tiny_tokenizer(), chunk_size=16, max_chunks=None)


# --- as a table ----------------------------------------------------------------------------------


def job_of(file: str) -> str:
    """What a module says of itself in its first line."""
    text = ast.get_docstring(ast.parse((Path(SOURCE) / f"{file}.py").read_text())) or ""
    return " ".join(text.split("\n\n")[0].split()).removesuffix(".")


def table(ways: dict[str, Way]) -> str:
    """Every file that a way passes, the first way's in its order, with what it is for."""
    files = dict.fromkeys(file for way in ways.values() for file in way.files)
    lines = [
        f"| | {' | '.join(ways)} | what it is for |",
        "| --- |" + " --- |" * (len(ways) + 1),
        "| files, hops | "
        + " | ".join(f"{len(way.files)}, {len(way.hops)}" for way in ways.values())
        + " | |",
    ]
    for file in files:
        marks = " | ".join("x" if file in way.files else "" for way in ways.values())
        lines.append(f"| `{file}` | {marks} | {job_of(file)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table({"generate": warm_generate(), "RAG": rag_generate(), "served": served()}) + "\n")
