"""Who takes part in `bench serve`: how each server is started, and what it calls the model.

Those of transformers are in an environment that `make peers` makes. Starts nothing.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from kvboost.loading.embedded import BUILTIN_NAME, ensure_checkpoint

HTTP_PEER = "transformers_serve"  # its folder among the peers of `make peers`
KVBOOST, ALONE, PAGED, PLAIN = "kvboost", "no_batching", "transformers_cb", "transformers"
LABELS = {
    KVBOOST: "kvboost serve",
    ALONE: "  --no-batching",
    PAGED: "transformers serve, continuous batching",
    PLAIN: "transformers serve",
}
KVBOOST_COMMAND = (sys.executable, "-c", "from kvboost.cli.main import main; main()")
PEER_FLAGS = ("--device", "cpu", "--dtype", "float32")
# What continuous batching runs best with on a CPU, tried with this workload.
PAGED_FLAGS = (
    "--continuous-batching",
    "--cb-max-memory-percent",
    "0.3",
    "--cb-max-batch-tokens",
    "512",
    "--cb-num-blocks",
    "64",
    "--no-cb-use-cuda-graph",
)


@dataclass(frozen=True)
class Contestant:
    """How a server is started, and what it calls the model."""

    name: str
    command: tuple[str, ...]
    model: str
    ready_path: str
    environment: dict[str, str]
    folder: Path | None = None


def contestants(model: str, flags: tuple[str, ...], peer: Path) -> dict[str, Contestant]:
    """All that could take part, ours with `flags`; those of transformers only where `peer` is set up."""
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "HF_HUB_OFFLINE": "1"}
    ours = (*KVBOOST_COMMAND, "serve", model, "--port", "{port}", "--dtype", "float32")
    found = {
        name: Contestant(name, (*ours, *flags, *more), model, "/ready", threads)
        for name, more in ((KVBOOST, ()), (ALONE, ("--no-batching",)))
    }
    if (peer / "peer.json").is_file():
        about = json.loads((peer / "peer.json").read_text())
        checkpoint = checkpoint_of(model)
        theirs = (str(peer / about["python"]), *about["serve"], checkpoint, *PEER_FLAGS, "--port", "{port}")
        environment = {**threads, "PYTHONNOUSERSITE": "1", **about.get("environment", {})}
        for name, more in ((PAGED, PAGED_FLAGS), (PLAIN, ())):
            command = (*theirs, "--host", "127.0.0.1", *more)
            found[name] = Contestant(name, command, checkpoint, "/health", environment, peer)
    return found


def checkpoint_of(model: str) -> str:
    """The model as transformers loads it."""
    return str(ensure_checkpoint()) if model == BUILTIN_NAME else model


def reason_not_there(folder: Path) -> str | None:
    """Why the peer in `folder` cannot be started; None where it can."""
    if (folder / "peer.json").is_file():
        return None
    note = folder / "unavailable.txt"
    return " ".join(note.read_text().split()) if note.is_file() else "not set up; run make peers"
