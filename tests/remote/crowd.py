"""Processes that store and read one Redis for a while, and say how many answers were wrong.

Run as a script: address, seconds, seed. The last line of its output is a JSON object.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from kvboost import KVBoost
from kvboost.remote import cache
from tests.remote.servers import environment
from tests.remote.traffic import Outcome, Traffic
from tests.tiny_models import long_model, tiny_tokenizer

_OF_ITS_OWN = 6  # prompts that only one process has
_MOST_ROUND = 30


def work(address: str, seconds: float, seed: int) -> dict[str, Any]:
    """Requests in random order, forgetting all now and then, until the time is over."""
    cache._LEAST_S = 1.0  # four processes at once are slow
    draw = random.Random(seed)
    outcome = Outcome()
    with KVBoost(
        long_model(), tiny_tokenizer(), chunk_size=32, remote_cache=address, max_chunks=60
    ) as engine:
        shared = Traffic(engine, count=24, seed=1, tokens=500)
        own = Traffic(engine, count=_OF_ITS_OWN, seed=10 + seed, tokens=400)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            engine.clear()
            for _ in range(draw.randrange(1, _MOST_ROUND)):
                traffic = own if draw.random() < 0.2 else shared
                traffic.ask(engine, draw.randrange(len(traffic.prompts)), outcome)
        engine.cache_manager.check_integrity()
        remote = engine.cache_stats()["remote"]
    return {
        "requests": outcome.requests,
        "wrong": outcome.wrong,
        "failed": outcome.failed,
        "cached_tokens": outcome.cached_tokens,
        "remote": remote,
    }


def run_crowd(address: str, seconds: float, home: Path, count: int = 4) -> list[dict[str, Any]]:
    """What each of some processes says."""
    command = [sys.executable, "-m", "tests.remote.crowd", address, str(seconds)]
    processes = []
    for number in range(count):
        where = environment(home / str(number))
        process = subprocess.Popen(
            [*command, str(number)],
            cwd=Path(__file__).parents[2],
            env=where,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
    found = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=seconds + 180)
            assert process.returncode == 0, err[-3000:]
            found.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return found


def main() -> None:
    torch.set_num_threads(1)
    address, seconds, seed = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    sys.stdout.write(json.dumps(work(address, seconds, seed)) + "\n")


if __name__ == "__main__":
    main()
