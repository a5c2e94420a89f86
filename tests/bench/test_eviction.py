"""`kvboost bench eviction`: the chats, the rivals, and that the best pin set is the best."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
from click.testing import CliRunner

from benchmarks.suite import eviction, tiny_kv
from benchmarks.suite.chats import ChatSettings, ChatTurn, replayed_turns
from benchmarks.suite.eviction import LruManager, best_pin_set, replay
from kvboost.cli.main import main
from kvboost.store.manager import KVCacheManager

CHUNK = 16
CHATS = ChatSettings(
    chats=12,
    assistants=3,
    users=5,
    open_chats=4,
    system_tokens=(20, 60),
    profile_tokens=(5, 20),
    question_tokens=(3, 20),
    answer_tokens=(3, 20),
)
TOKEN_SIZE = tiny_kv.tiny_codec().layout.bytes_per_token


def turn_of(*parts: range) -> ChatTurn:
    return ChatTurn(np.concatenate([np.asarray(part) for part in parts]), np.asarray([], dtype=np.int64))


# --- the chats -------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_chats() -> None:
    first, again, other = (replayed_turns(CHATS, seed) for seed in (1, 1, 2))
    assert [turn.text.tolist() for turn in first] == [turn.text.tolist() for turn in again]
    assert [turn.text.tolist() for turn in first] != [turn.text.tolist() for turn in other]


def test_every_turn_goes_on_from_one_before_it() -> None:
    turns = replayed_turns(CHATS, 0)
    lengths: dict[bytes, int] = {}  # text of a chat so far -> its turns
    for turn in turns:
        before = [text for text in lengths if turn.prompt.tobytes().startswith(text)]
        count = lengths.pop(max(before, key=len)) + 1 if before else 1
        lengths[turn.text.tobytes()] = count
    assert len(lengths) == 12
    assert all(3 <= count <= 8 for count in lengths.values())


def test_chats_share_beginnings_and_interleave() -> None:
    turns = replayed_turns(CHATS, 0)
    assert len({turn.prompt[:20].tobytes() for turn in turns}) <= 3  # system prompts
    switches = sum(
        not later.prompt.tobytes().startswith(earlier.text.tobytes())
        for earlier, later in itertools.pairwise(turns)
    )
    assert switches > len(turns) / 2


# --- the rivals ------------------------------------------------------------------------------


def test_lru_forgets_what_was_used_longest_ago() -> None:
    manager = LruManager(3, None, chunk_size=CHUNK)
    texts = [np.arange(start, start + CHUNK) for start in (0, 100, 200, 300, 400)]
    for text in texts[:3]:
        tiny_kv.store(manager, text)
    for _ in range(5):
        manager.find_matching_chunks(texts[0].tolist())  # used often, but not lately
    for text in (texts[1], texts[2]):
        manager.find_matching_chunks(text.tolist())
    tiny_kv.store(manager, texts[3])
    assert [manager.match_prefix(text).length for text in texts[:4]] == [0, CHUNK, CHUNK, CHUNK]
    tiny_kv.store(manager, texts[4])
    assert manager.match_prefix(texts[1]).length == 0
    manager.check_integrity()


def test_a_replay_counts_what_is_reused() -> None:
    manager = KVCacheManager(None, chunk_size=CHUNK)
    turns = [turn_of(range(40)), turn_of(range(40)), turn_of(range(40), range(500, 510)), turn_of(range(20))]
    assert replay(manager, turns) == [0, 39, 40, 19]


def test_the_best_pin_set_is_the_best_of_all_sets() -> None:
    """Small enough to try every set of chunks that is closed under parents."""
    turns = [
        *[turn_of(range(32))] * 4,
        *[turn_of(range(16), range(100, 116))] * 3,
        *[turn_of(range(200, 232))] * 2,
        turn_of(range(300, 332)),
    ]
    manager = KVCacheManager(None, chunk_size=CHUNK)
    most = replay(manager, turns)
    chunks = {m.chunk.chunk_id: m for turn in turns for m in manager.match_prefix(turn.prompt).matches}
    for fitting in range(len(chunks) + 1):
        best = 0
        for chosen in itertools.combinations(chunks, fitting):
            served = 0
            for turn, reused in zip(turns, most, strict=True):
                for found in manager.match_prefix(turn.prompt).matches:
                    if found.chunk.chunk_id not in chosen:
                        break
                    served += max(min(found.end, reused) - found.start, 0)
            best = max(best, served)
        assert best_pin_set(manager, turns, most, fitting * CHUNK * TOKEN_SIZE) == best


def test_a_budget_for_everything_loses_nothing() -> None:
    settings = eviction.EvictionSettings(CHATS, (4,), (0, 1), budget_share=1.0, chunk_size=CHUNK)
    record = eviction.run(settings)
    for item in record["levels"][0]["replays"]:
        assert item["evicted_chunks"] == 0
        assert len(set(item["hit_share"].values())) == 1
    assert all(target["met"] for target in record["levels"][0]["targets"])


def test_the_command(tmp_path: Path) -> None:
    arguments = ["--chats", "6", "--open-chats", "2,6", "--seeds", "2", "--out", str(tmp_path)]
    outcome = CliRunner().invoke(main, ["bench", "eviction", *arguments])
    assert outcome.exit_code == 0, outcome.stderr
    record = json.loads(outcome.stdout.splitlines()[-1])
    assert record == json.loads((tmp_path / "eviction-cpu.json").read_text())
    assert [level["open_chats"] for level in record["levels"]] == [2, 6]
    for level in record["levels"]:
        assert list(level["hit_share"]) == list(eviction.CONTESTANTS)
        assert all(0 <= share["low"] <= share["high"] <= 1 for share in level["hit_share"].values())
    assert "best pin set" in outcome.stdout
