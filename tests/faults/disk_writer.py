"""Chunks that follow from their number, and processes that write, read and evict them in one folder.

Run as a script it is a parent that starts its children by fork, so that one more costs milliseconds: a line
`start {json}` on its input answers with a process id, `wait {pid}` with an exit status.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
import traceback
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import torch

from kvboost.disk.serde import to_record
from kvboost.disk.tier import DiskTier
from kvboost.models import CachedChunk, chained_hash, content_hash_from_tokens

SLOT_BYTES = 32_768
TOKENS = 16
WRONG_TENSOR = 3  # exit status
FAILED = 1
_HEADS = ((2, 16), (1, 32))  # (kv_heads, head_dim) of each layer
_ROOT = Path(__file__).parents[2]


def tokens_of(number: int) -> list[int]:
    return [number * 1_000 + place for place in range(TOKENS)]


def key_of(number: int) -> str:
    return chained_hash(tokens_of(number))


def kv_of(number: int) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """KV in which every single number tells to which chunk, layer and place it belongs."""
    pairs = []
    for layer, (heads, dim) in enumerate(_HEADS):
        count = heads * TOKENS * dim
        keys = torch.arange(count, dtype=torch.float32).view(1, heads, TOKENS, dim)
        keys = keys + number * 16_384 + layer * 8_192
        pairs.append((keys, keys + 0.5))
    return tuple(pairs)


def chunk_of(number: int) -> CachedChunk:
    key = key_of(number)
    return CachedChunk(
        chunk_id=key,
        text=f"chunk {number}",
        token_ids=tokens_of(number),
        past_key_values=kv_of(number),
        position_start=0,
        position_end=TOKENS,
        prefix_hash=key,
        content_hash=content_hash_from_tokens(tokens_of(number)),
    )


def is_right(chunk: CachedChunk, number: int) -> bool:
    """Whether a chunk that was read is the one of that number, to the last bit."""
    same = all(
        found.dtype == wanted.dtype and torch.equal(found, wanted)
        for pair, wanted_pair in zip(chunk.past_key_values, kv_of(number), strict=True)
        for found, wanted in zip(pair, wanted_pair, strict=True)
    )
    return same and list(chunk.token_ids) == tokens_of(number) and chunk.prefix_hash == key_of(number)


@dataclass(frozen=True)
class Job:
    """What a child does: write, read and evict at random for so long."""

    folder: str
    max_chunks: int
    numbers: int  # chunks to choose from
    seed: int
    seconds: float
    report: str  # a file that says what went wrong
    grows: bool = False


def work(job: Job) -> None:
    """Use the folder until the time is over; a wrong tensor or any exception ends the process."""
    draw = random.Random(job.seed)
    until = time.monotonic() + job.seconds
    while time.monotonic() < until:
        with DiskTier(job.folder, max_chunks=job.max_chunks, slot_bytes=SLOT_BYTES, grows=job.grows) as tier:
            for _ in range(draw.randrange(20, 200)):
                if time.monotonic() >= until:
                    return
                _one_step(tier, draw, job)


def _one_step(tier: DiskTier, draw: random.Random, job: Job) -> None:
    number, dice = draw.randrange(job.numbers), draw.random()
    if dice < 0.45:
        several = range(number, min(number + draw.randrange(1, 4), job.numbers))
        tier.write_records([to_record(chunk_of(one)) for one in several])
    elif dice < 0.85:
        found = tier.read(key_of(number))
        if found is not None and not is_right(found, number):
            Path(job.report).write_text(f"a wrong tensor for chunk {number}, seed {job.seed}\n")
            os._exit(WRONG_TENSOR)
    elif dice < 0.93:
        tier.touch([key_of(number)])
    elif dice < 0.97:
        tier.remove([key_of(number)])
    else:
        tier.refresh()


def _run_child(job: Job) -> int:
    warnings.simplefilter("error")  # an index that needs rebuilding is a failure here
    torch.set_num_threads(1)
    try:
        work(job)
    except BaseException:
        Path(job.report).write_text(traceback.format_exc())
        return FAILED
    return 0


def main() -> None:
    """Start and reap children, one line of input at a time."""
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        command, _, rest = line.strip().partition(" ")
        if command == "start":
            pid = os.fork()
            if pid == 0:
                os._exit(_run_child(Job(**json.loads(rest))))
            sys.stdout.write(f"{pid}\n")
        else:
            sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(int(rest), 0)[1])}\n")
        sys.stdout.flush()


class Writers:
    """The script above as a process of its own, and the children that it started."""

    def __enter__(self) -> Writers:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.disk_writer"],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self._answer() == "ready"
        self._running: set[int] = set()
        return self

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def _ask(self, line: str) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return int(self._answer())

    def start(self, job: Job) -> int:
        pid = self._ask(f"start {json.dumps(asdict(job))}")
        self._running.add(pid)
        return pid

    def wait(self, pid: int) -> int:
        """Its exit status, negative where a signal ended it."""
        self._running.discard(pid)
        return self._ask(f"wait {pid}")

    def kill(self, pid: int) -> int:
        os.kill(pid, 9)
        return self.wait(pid)

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _where: TracebackType | None
    ) -> None:
        for pid in tuple(self._running):
            self.kill(pid)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()


if __name__ == "__main__":
    main()
