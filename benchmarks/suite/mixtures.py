"""`bench mixtures`: does the cost guard ever lose? Prompts of many sizes, of which more or less is known.

Every prompt has documents of which the first part was read before, at other positions; the rest of each, what
stands before them and the question are new in every round. Each is asked in pairs with BASELINE. Knows no
terminal.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvboost.bench.record import at_least, at_most, head_of, spread
from kvboost.bench.text import TextSource
from kvboost.choices import GenerationMode
from kvboost.models import GenerationResult

Report = Callable[[int, int, str], None]
MAX_RATIO = 1.05
# From so many tokens on, and with such a share of them known, reuse must be chosen.
MUST_REUSE = (4_000, 0.6)
_LEAST_KNOWN = 100  # tokens of a document: fewer may not be found
_LEAD, _QUESTION = 16, 40  # new tokens before the documents and behind them
_WARM_UPS = {False: 1, True: 3}  # on a CPU and on a GPU, where steps are captured when they come again
_MODES = (GenerationMode.BASELINE, GenerationMode.CHUNK_KV_REUSE)


@dataclass(frozen=True)
class MixtureSettings:
    """How much is measured: prompts from `shortest` to `longest` tokens."""

    mixtures: int = 20
    shortest: int = 500
    longest: int = 32_000
    most_documents: int = 30
    rounds: int = 3
    seed: int = 0


@dataclass(frozen=True)
class Mixture:
    """A prompt of `tokens` tokens: so many documents, and the share of each that was read before."""

    tokens: int
    documents: int
    known: float

    @property
    def must_reuse(self) -> bool:
        return self.tokens >= MUST_REUSE[0] and self.known >= MUST_REUSE[1]


def mixtures(settings: MixtureSettings) -> list[Mixture]:
    """Lengths evenly spread by their ratio; documents and shares drawn, the shares from 10 to 100%."""
    draw = random.Random(settings.seed)
    last = max(1, settings.mixtures - 1)
    shares = [round(0.1 + 0.9 * number / last, 2) for number in range(settings.mixtures)]
    draw.shuffle(shares)
    found = []
    for number, known in enumerate(shares):
        tokens = round(settings.shortest * (settings.longest / settings.shortest) ** (number / last))
        most = max(1, min(settings.most_documents, int(tokens * known) // _LEAST_KNOWN))
        found.append(Mixture(tokens, draw.randint(1, most), known))
    return found


def run(
    engine: Any,
    model: str,
    settings: MixtureSettings,
    report: Report = lambda _done, _total, _text: None,
) -> dict[str, Any]:
    """Measure and return the record; `report` hears how far it is."""
    head = head_of("mixtures", engine, model, settings)
    head["cache_device"] = engine.core.parts.settings.cache_device
    words = TextSource(engine.tokenizer, 1_000).prefix(1_000)
    draw = random.Random(settings.seed)
    rows = []
    for number, mixture in enumerate(mixtures(settings)):
        report(number, settings.mixtures, f"{mixture.tokens:,} tokens, {mixture.known:.0%} known")
        rows.append(_measure(engine, mixture, settings.rounds, lambda count: draw.choices(words, k=count)))
    report(settings.mixtures, settings.mixtures, "done")
    return {**head, "rows": rows, "targets": targets(rows)}


def _measure(engine: Any, mixture: Mixture, rounds: int, text: Callable[[int], list[int]]) -> dict[str, Any]:
    engine.clear()
    each = mixture.tokens // mixture.documents
    known = [text(round(each * mixture.known)) for _ in range(mixture.documents)]
    for document in known:
        engine.warm(document)
    results: dict[GenerationMode, list[GenerationResult]] = {mode: [] for mode in _MODES}
    for number in range(-_WARM_UPS[engine.model.device.type == "cuda"], rounds):
        prompt = text(_LEAD)
        for document in known[number % len(known) :] + known[: number % len(known)]:
            prompt += document + text(each - len(document))
        prompt += text(_QUESTION)
        for mode in _MODES if number % 2 else _MODES[::-1]:
            if number >= -1 or mode is not GenerationMode.BASELINE:  # which needs but one round to warm up
                result = engine.generate(prompt, 2, mode=mode, min_new_tokens=2)
                results[mode] += [result] if number >= 0 else []
    engine.clear()
    return _row(mixture, *results.values())


def _row(mixture: Mixture, baseline: list[GenerationResult], ours: list[GenerationResult]) -> dict[str, Any]:
    before, now = ([result.ttft_ms for result in results] for results in (baseline, ours))
    tokens = sum(result.prompt_tokens for result in ours)
    return {
        "tokens": ours[0].prompt_tokens,
        "documents": mixture.documents,
        "known": mixture.known,
        "must_reuse": mixture.must_reuse,
        "reused": all(result.recomputed_tokens for result in ours),
        "cached_share": round(sum(result.cached_tokens for result in ours) / tokens, 4),
        "recomputed_share": round(sum(result.recomputed_tokens for result in ours) / tokens, 4),
        "baseline_ttft_ms": spread(before),
        "ttft_ms": spread(now),
        "ratio": round(statistics.median(now) / statistics.median(before), 3),
    }


def targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was to be reached, and whether it was."""
    must = [row for row in rows if row["must_reuse"]]
    found = [at_most("slowest mixture / baseline", max(row["ratio"] for row in rows), MAX_RATIO)]
    if must:
        share = sum(row["reused"] for row in must) / len(must)
        tokens, known = MUST_REUSE
        found.append(at_least(f"reused, of those with {tokens:,} tokens and {known:.0%} known", share, 1.0))
    return found
