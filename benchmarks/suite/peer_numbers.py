"""What the turns of `bench peers` come to: distance from plain, where the time goes, targets.

Knows turns and records, not how they are measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.suite.peer_process import Turn
from kvboost.bench.contestants import Plain

OURS = ("kvboost", "kvboost_copied")
_KINDS = {  # of work, by what is in the name of an operator
    "linear_layers": ("linear", "addmm", "::mm", "::matmul"),
    "attention": ("attention",),
}
NOT_PYTHON = ("llama_cpp",)
LONG_TOKENS = 4_096  # from here on the stricter targets hold
MAX_OVER_PYTHON = 1.0
MAX_OVER_NATIVE = 1.25
MAX_OVER_BEST = 1.5


def quality_of(name: str, rounds: Sequence[dict[str, Turn]]) -> dict[str, Any]:
    """Mean KL of the first token's distribution from plain's, in nats, where it is known."""
    found, same = [], 0
    for turns in rounds:
        plain, ours = (turns[who].logits if who in turns else None for who in (Plain.name, name))
        if plain is None or ours is None or len(plain) != len(ours):
            continue
        reference, other = (torch.log_softmax(logits.double(), dim=-1) for logits in (plain, ours))
        found.append(float((reference.exp() * (reference - other)).sum().clamp_min(0)))
        same += int(reference.argmax() == other.argmax())
    return {
        "first_token_kl": float(f"{statistics.fmean(found):.3g}") if found else None,
        "first_token_same": same,
        "first_token_prompts": len(found),
    }


def parts_of(events: Any, ttft_ms: float) -> dict[str, float]:
    """Milliseconds of a request by kind of work; what no operator accounts for is Python's."""
    parts = {"linear_layers": 0.0, "attention": 0.0, "other_operators": 0.0}
    for event in events:
        if event.key.startswith(("aten::", "mkldnn::")):
            kinds = (kind for kind, words in _KINDS.items() if any(word in event.key for word in words))
            parts[next(kinds, "other_operators")] += event.self_cpu_time_total / 1e3
    return {"ttft_ms": ttft_ms, **parts, "python": max(0.0, ttft_ms - sum(parts.values()))}


def targets(lengths: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was to be reached, what was, and whether that is enough; only what was measured."""
    found = []
    for item in lengths:
        medians = {name: one["ttft_ms"]["median"] for name, one in item["contestants"].items()}
        ours = medians["kvboost"]
        others = {name: median for name, median in medians.items() if name not in OURS}
        shared = f"{item['shared_tokens']:,}"
        if item["shared_tokens"] < LONG_TOKENS:
            best = min(others, key=lambda name: others[name])
            found.append(_at_most(f"{shared}: kvboost / best ({best})", ours / others[best], MAX_OVER_BEST))
            continue
        for name, median in others.items():
            limit = MAX_OVER_NATIVE if name in NOT_PYTHON else MAX_OVER_PYTHON
            found.append(_at_most(f"{shared}: kvboost / {name}", ours / median, limit))
    return found


def _at_most(name: str, value: float, limit: float) -> dict[str, Any]:
    return {"name": name, "value": round(value, 3), "at_most": limit, "met": value <= limit}
