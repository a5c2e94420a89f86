"""`bench chat`: chats turn by turn, the time to the first token with and without reuse.

Every turn sends the whole chat so far, as chat clients do. Chats take turns with each other, so that a
chat's KV comes out of the store and not out of the last request's arena. Knows no terminal.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvboost.bench.record import machine_record, spread
from kvboost.engine import InferenceEngine
from kvboost.proof.documents import plain_text

Report = Callable[[int, int, str], None]
QUESTIONS = (
    "What is this text about?",
    "Say that in other words.",
    "Which word in it is the most important one?",
    "Write one sentence more in the same style.",
    "Is there anything in it that you would leave out?",
    "Now sum up our conversation.",
)


@dataclass(frozen=True)
class ChatSettings:
    """How many chats of what shape; BASELINE, the slow one, answers only some of them."""

    chats: int = 6
    turns: int = 6
    new_tokens: int = 32
    document_words: int = 300
    baseline_chats: int = 2


@dataclass(frozen=True)
class Turn:
    """One answer: times in milliseconds."""

    chat: int
    number: int
    prompt_tokens: int
    cached_tokens: int
    ttft_ms: float
    baseline_ttft_ms: float | None
    same_tokens: bool | None


def run(
    engine: InferenceEngine,
    model: str,
    settings: ChatSettings,
    report: Report = lambda _done, _total, _text: None,
) -> dict[str, Any]:
    """Measure and return the record; `report` hears how far it is."""
    machine = machine_record(engine.model.get_input_embeddings().weight.device)
    words = plain_text().split()
    size = settings.document_words
    chats: list[list[dict[str, str]]] = [
        [{"role": "system", "content": " ".join(words[number * size : (number + 1) * size])}]
        for number in range(settings.chats)
    ]
    engine.generate([{"role": "user", "content": "Hello."}], 2)  # warm up
    engine.clear()
    turns: list[Turn] = []
    total = settings.turns * settings.chats
    for number in range(settings.turns):
        for chat, messages in enumerate(chats):
            report(len(turns), total, f"turn {number + 1} of {settings.turns}, chat {chat + 1}")
            messages.append({"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]})
            turns.append(_turn(engine, messages, chat, number, settings))
    report(total, total, "done")
    return {
        "benchmark": "chat",
        "model": model,
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "machine": machine,
        "settings": dataclasses.asdict(settings),
        "results": [_summary(number, turns) for number in range(settings.turns)],
        "same_answers": sum(turn.same_tokens is True for turn in turns),
        "compared": sum(turn.same_tokens is not None for turn in turns),
    }


def _turn(
    engine: InferenceEngine, messages: list[dict[str, str]], chat: int, number: int, settings: ChatSettings
) -> Turn:
    result = engine.generate(messages, settings.new_tokens, mode="prefix_cache")
    plain = None
    if chat < settings.baseline_chats:
        plain = engine.generate(messages, settings.new_tokens, mode="baseline")
    messages.append({"role": "assistant", "content": result.output_text})
    return Turn(
        chat,
        number,
        result.prompt_tokens,
        result.cached_tokens,
        result.ttft_ms,
        plain.ttft_ms if plain is not None else None,
        plain.token_ids == result.token_ids if plain is not None else None,
    )


def _summary(number: int, turns: list[Turn]) -> dict[str, Any]:
    """One turn over all chats."""
    found = [turn for turn in turns if turn.number == number]
    plain = [turn.baseline_ttft_ms for turn in found if turn.baseline_ttft_ms is not None]
    middle = statistics.median(turn.ttft_ms for turn in found)
    return {
        "turn": number + 1,
        "prompt_tokens": round(statistics.fmean(turn.prompt_tokens for turn in found)),
        "cached_tokens": round(statistics.fmean(turn.cached_tokens for turn in found)),
        "ttft_ms": spread([turn.ttft_ms for turn in found]),
        "baseline_ttft_ms": spread(plain) if plain else None,
        "speedup": round(statistics.median(plain) / middle, 2) if plain else None,
    }
