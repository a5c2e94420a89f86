"""Every model type, one after the other, in processes that may crash: the sweep behind docs/models.md.

`python -m tests.sweep.sweep [TYPE ...]` prints the outcomes; the test writes them to benchmarks/results/.
"""

from __future__ import annotations

import collections
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from tests.sweep.check import ERROR, Outcome
from tests.sweep.tiny_configs import class_name, model_types

ROOT = Path(__file__).parents[2]
SECONDS_PER_TYPE = 120.0


def sweep(types: Sequence[str], workers: int = 2) -> list[Outcome]:
    """The outcome of every type, in the same order."""
    shares = [list(types[number::workers]) for number in range(workers)]
    found: dict[str, Outcome] = {}
    threads = [threading.Thread(target=_share, args=(share, found)) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[model_type] for model_type in types]


def _share(types: list[str], found: dict[str, Outcome]) -> None:
    """Run types in one process; one that ends it or takes too long is noted, and the rest go on."""
    waiting = collections.deque(types)
    while waiting:
        for outcome in _run(list(waiting)):
            found[outcome.model_type] = outcome
            waiting.popleft()


def _run(types: list[str]) -> list[Outcome]:
    """The outcomes of as many of `types` as one process lives for, and of the one that ended it."""
    command = [sys.executable, "-m", "tests.sweep.check", *types]
    outcomes: list[Outcome] = []
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
        reader.start()
        reason = ""
        while len(outcomes) < len(types):
            try:
                line = lines.get(timeout=SECONDS_PER_TYPE)
            except queue.Empty:
                reason = f"took longer than {SECONDS_PER_TYPE:.0f} s"
                break
            if not line:
                reason = "ended the process"
                break
            if line.startswith("{"):
                outcomes.append(Outcome(**json.loads(line)))
        process.kill()
        reader.join()
    if reason:
        ended = types[len(outcomes)]
        outcomes.append(Outcome(ended, class_name(ended), ERROR, reason))
    return outcomes


def _read(stdout: object, lines: queue.SimpleQueue[str]) -> None:
    for line in stdout:  # type: ignore[attr-defined]
        lines.put(line)
    lines.put("")


if __name__ == "__main__":
    outcomes = sweep(sys.argv[1:] or model_types())
    for outcome in outcomes:
        sys.stdout.write(f"{outcome}\n")
    sys.stdout.write(f"{collections.Counter(outcome.outcome for outcome in outcomes)}\n")
