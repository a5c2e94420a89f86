"""`bench eviction`: how much of many chats' tokens a small store still serves, against other rules.

The same chats are replayed against the store as it is, a store that evicts what was used longest
ago (LRU), one without a limit, and the best fixed set of chunks that could have been chosen with
all of it known beforehand. No model: tiny KV. Knows no terminal.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.suite import tiny_kv
from benchmarks.suite.chats import ChatSettings, ChatTurn, replayed_turns
from kvboost.bench.record import machine_record
from kvboost.store.budget import MemoryTier
from kvboost.store.manager import KVCacheManager

Tell = Callable[[str], None]
CONTESTANTS = ("kvboost", "lru", "best pin set", "unlimited")
MIN_SHARE_OF_PIN_SET = 0.9


@dataclass(frozen=True)
class EvictionSettings:
    """What is replayed, how often, and the budget as a share of what no limit would keep.

    `open_chats` are several numbers of chats that go on at the same time, one measurement each.
    """

    chats: ChatSettings = dataclasses.field(default_factory=ChatSettings)
    open_chats: tuple[int, ...] = (20, 100, 300)
    seeds: tuple[int, ...] = tuple(range(5))
    budget_share: float = 0.3
    chunk_size: int = 128


class LruTier(MemoryTier):
    """Evicts what was used longest ago, however often it was used."""

    def touch(self, entry: str, uses: int) -> None:  # noqa: ARG002 - the rule is not to look at it
        super().touch(entry, 0)


class LruManager(KVCacheManager):
    """The store with plain LRU in place of its rule; all else is the same."""

    budget_type = LruTier


def run(settings: EvictionSettings, tell: Tell = lambda _text: None) -> dict[str, Any]:
    """Replay every seed's chats, return the record; `tell` hears what is being done."""
    return {
        "benchmark": "eviction",
        "machine": machine_record(torch.device("cpu")),
        "settings": dataclasses.asdict(settings),
        "levels": [_measure_level(settings, open_chats, tell) for open_chats in settings.open_chats],
    }


def _measure_level(settings: EvictionSettings, open_chats: int, tell: Tell) -> dict[str, Any]:
    """All seeds with `open_chats` chats going on at the same time."""
    chats = dataclasses.replace(settings.chats, open_chats=open_chats)
    replays = []
    for number, seed in enumerate(settings.seeds):
        tell(f"{open_chats} chats at a time: replay {number + 1} of {len(settings.seeds)}")
        replays.append(_replay_all(settings, seed, replayed_turns(chats, seed)))
    return {
        "open_chats": open_chats,
        "hit_share": {
            name: _mean_and_range([replay["hit_share"][name] for replay in replays]) for name in CONTESTANTS
        },
        "targets": _targets(replays),
        "replays": replays,
    }


def _replay_all(settings: EvictionSettings, seed: int, turns: list[ChatTurn]) -> dict[str, Any]:
    """The same turns for everybody."""
    size = settings.chunk_size
    unlimited = KVCacheManager(None, None, chunk_size=size)
    most = replay(unlimited, turns)
    total_bytes = int(unlimited.stats()["bytes"])
    budget = int(total_bytes * settings.budget_share)
    ours = KVCacheManager(None, budget, chunk_size=size)
    hits = {
        "kvboost": sum(replay(ours, turns)),
        "lru": sum(replay(LruManager(None, budget, chunk_size=size), turns)),
        "best pin set": best_pin_set(unlimited, turns, most, budget),
        "unlimited": sum(most),
    }
    prompt_tokens = sum(len(turn.prompt) for turn in turns)
    return {
        "seed": seed,
        "turns": len(turns),
        "prompt_tokens": prompt_tokens,
        "unlimited_chunks": len(unlimited),
        "unlimited_bytes": total_bytes,
        "budget_bytes": budget,
        "evicted_chunks": ours.stats()["evicted_chunks"],
        "hit_share": {name: round(hits[name] / prompt_tokens, 4) for name in CONTESTANTS},
    }


def replay(manager: KVCacheManager, turns: list[ChatTurn]) -> list[int]:
    """Serve all turns as the engine does; returns the reused tokens of each."""
    reused = []
    for turn in turns:
        match = manager.match_prefix(turn.prompt, hold=True)
        reused.append(min(match.length, len(turn.prompt) - 1))  # one token is always computed
        manager.release(match, used_tokens=reused[-1])
        tiny_kv.store(manager, turn.text)
    return reused


def best_pin_set(unlimited: KVCacheManager, turns: list[ChatTurn], most: list[int], budget: int) -> int:
    """Tokens reused when the best fixed set of chunks is kept from the moment each one is there.

    `unlimited` holds all chunks after its replay, which reused `most` tokens per turn. A chunk is worth
    the tokens reused from it. Per byte, no chunk is worth more than the one before it, so taking the
    worthiest first never leaves one without its parent, and as long as chunks are about the same size no
    other set that fits serves more.
    """
    worth: dict[str, int] = {}
    size_bytes: dict[str, int] = {}
    for turn, reused in zip(turns, most, strict=True):
        for found in unlimited.match_prefix(turn.prompt).matches:
            if (tokens := min(found.end, reused) - found.start) > 0:
                key = found.chunk.chunk_id
                worth[key] = worth.get(key, 0) + tokens
                size_bytes[key] = found.chunk.memory_bytes()
    reused_tokens = 0
    for key in sorted(worth, key=lambda key: worth[key] / size_bytes[key], reverse=True):
        budget -= size_bytes[key]
        if budget < 0:
            break
        reused_tokens += worth[key]
    return reused_tokens


def _mean_and_range(values: list[float]) -> dict[str, float]:
    return {
        "mean": round(statistics.fmean(values), 4),
        "low": round(min(values), 4),
        "high": round(max(values), 4),
    }


def _targets(replays: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was to be reached in every replay, what was, and whether that is enough."""
    found = []
    for rival, least in (("best pin set", MIN_SHARE_OF_PIN_SET), ("lru", 1.0)):
        ratios = [replay["hit_share"]["kvboost"] / replay["hit_share"][rival] for replay in replays]
        found.append(
            {
                "name": f"kvboost / {rival}",
                **_mean_and_range(ratios),
                "at_least": least,
                "met": min(ratios) >= least,
            }
        )
    return found
