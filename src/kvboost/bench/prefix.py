"""`bench prefix`: time to the first token when a long beginning was seen before, against others.

One process, one model, the same token ids for all, contestants taking turns within every round.
The tail of the prompt is new in every round, because the engine stores what it has answered.
A second part compares a first, cold request with and without storing. Knows no terminal.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvboost.bench.contestants import (
    Contestant,
    HandMade,
    KVBoostCopied,
    KVBoostWarm,
    Plain,
    TimedAnswer,
    engine_answer,
    timed,
)
from kvboost.bench.record import head_of, pair_ratios, spread
from kvboost.bench.text import TextSource
from kvboost.engine import InferenceEngine

_WARM_UPS = {False: 1, True: 3}  # on a CPU and on a GPU: there steps are captured when they come again
Tell = Callable[[str], None]
Rounds = dict[str, dict[int, TimedAnswer]]  # contestant -> round -> what it did


@dataclass(frozen=True)
class PrefixSettings:
    """How much is measured. Plain generate is slow, so it takes part in fewer rounds."""

    lengths: tuple[int, ...] = (1_024, 2_048, 4_096)
    rounds: int = 10
    plain_rounds: int = 3
    tail_tokens: int = 20
    new_tokens: int = 32
    pairs: int = 21
    cold_tokens: int = 512


def run(
    engine: InferenceEngine, model: str, settings: PrefixSettings, tell: Tell = lambda _text: None
) -> dict[str, Any]:
    """Measure both parts and return the record; `tell` hears what is being done.

    The engine's cache needs room for everything: open it with `max_chunks=None`.
    """
    head = head_of("prefix", engine, model, settings)
    text = TextSource(engine.tokenizer, max(settings.lengths))
    tell("warming up")
    _take_turn(Plain(engine.model), text.fresh(64), 4)
    engine.warm(text.prefix(max(settings.lengths)))  # the shorter prefixes are part of the longest
    lengths = [_measure_length(engine, text, shared, settings, tell) for shared in settings.lengths]
    return {
        **head,
        "lengths": lengths,
        "storing": _measure_storing(engine, text, settings, tell),
    }


# --- a shared beginning --------------------------------------------------------------------------


def _measure_length(
    engine: InferenceEngine, text: TextSource, shared: int, settings: PrefixSettings, tell: Tell
) -> dict[str, Any]:
    prefix = text.prefix(shared)
    tell(f"{shared} shared tokens: preparing")
    contestants: list[Contestant] = [
        Plain(engine.model),
        HandMade(engine.model, prefix),
        KVBoostWarm(engine, prefix),
        KVBoostCopied(engine, prefix),
    ]
    for contestant in contestants[1:]:  # the first answer at a new length pays for fresh memory
        for _ in range(_WARM_UPS[engine.model.device.type == "cuda"]):
            _take_turn(contestant, prefix + text.fresh(settings.tail_tokens), 4)
    plain_at = spread_rounds(settings.plain_rounds, settings.rounds)
    done: Rounds = {contestant.name: {} for contestant in contestants}
    for number in range(settings.rounds):
        prompt = prefix + text.fresh(settings.tail_tokens)
        for contestant in contestants:
            if contestant.name != Plain.name or number in plain_at:
                tell(f"{shared} shared tokens: round {number + 1} of {settings.rounds}, {contestant.name}")
                done[contestant.name][number] = _take_turn(contestant, prompt, settings.new_tokens)
    return {
        "shared_tokens": shared,
        "contestants": {name: _outcome(turns, done[Plain.name]) for name, turns in done.items()},
        "ratios": _ratios(done),
    }


def _take_turn(contestant: Contestant, prompt: list[int], new_tokens: int) -> TimedAnswer:
    contestant.settle()
    return timed(functools.partial(contestant.answer, prompt, new_tokens))


def spread_rounds(count: int, rounds: int) -> set[int]:
    """`count` of the rounds, from the first to the last at equal distances."""
    count = min(count, rounds)
    return {round(index * (rounds - 1) / max(count - 1, 1)) for index in range(count)}


def _outcome(turns: dict[int, TimedAnswer], plain: dict[int, TimedAnswer]) -> dict[str, Any]:
    """Spreads of one contestant, and in how many of plain's rounds it gave plain's tokens."""
    return {
        "ttft_ms": spread([turn.ttft_ms for turn in turns.values()]),
        "decode_tokens_per_s": spread([turn.decode_tokens_per_s or 0.0 for turn in turns.values()]),
        "reused_tokens": min(turn.answer.reused_tokens for turn in turns.values()),
        "same_tokens_as_plain": sum(
            turns[number].answer.token_ids == turn.answer.token_ids for number, turn in plain.items()
        ),
        "compared_with_plain": len(plain),
    }


def _ratios(done: Rounds) -> dict[str, float]:
    """Ratios of medians. Below 1 is better for times to the first token, above 1 for the rest."""
    ttft = {name: statistics.median(t.ttft_ms for t in turns.values()) for name, turns in done.items()}
    decode = {
        name: statistics.median(t.decode_tokens_per_s or 0.0 for t in turns.values())
        for name, turns in done.items()
    }
    return {
        "ttft_kvboost_over_hand_made": round(ttft["kvboost"] / ttft["hand_made"], 3),
        "ttft_kvboost_copied_over_hand_made": round(ttft["kvboost_copied"] / ttft["hand_made"], 3),
        "ttft_speedup_over_plain": round(ttft["plain"] / ttft["kvboost"], 2),
        "decode_kvboost_over_plain": round(decode["kvboost"] / decode["plain"], 3),
    }


# --- what storing costs --------------------------------------------------------------------------


def _measure_storing(
    engine: InferenceEngine, text: TextSource, settings: PrefixSettings, tell: Tell
) -> dict[str, Any]:
    """Time to the first token of prompts never seen before, with storing and without, in pairs."""
    times: dict[str, list[float]] = {"baseline": [], "prefix_cache": []}
    for pair in range(-1, settings.pairs):  # the first pair warms up
        tell(f"storing: pair {max(pair, 0) + 1} of {settings.pairs}")
        prompt = text.fresh(settings.cold_tokens)
        for mode in sorted(times, reverse=pair % 2 == 0):
            turn = timed(functools.partial(engine_answer, engine, prompt, 2, mode=mode))
            if pair >= 0:
                times[mode].append(turn.ttft_ms)
    return {
        "prompt_tokens": settings.cold_tokens,
        "pairs": settings.pairs,
        "baseline_ttft_ms": spread(times["baseline"]),
        "prefix_cache_ttft_ms": spread(times["prefix_cache"]),
        **pair_ratios(times["prefix_cache"], times["baseline"]),
    }
