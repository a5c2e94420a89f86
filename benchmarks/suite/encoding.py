"""`bench encoding`: what overlap_k, sink_tokens and chunk_boundary_window do to the error of reuse.

The same prompts are encoded in several ways and reused twice: as a prefix, where they stood, and from
documents cached one by one, at other places. Knows engines and trials, no command line.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from kvboost.bench.record import machine_record
from kvboost.proof.documents import Case, groups_of, make_cases
from kvboost.proof.quality import Measured, ReuseTrial

Report = Callable[[int, int, str], None]
RATIO = 0.10
# The encodings that are compared, as engine options; the first is the default.
ENCODINGS: tuple[dict[str, int], ...] = (
    {},
    {"sink_tokens": 4},
    {"overlap_k": 16},
    {"overlap_k": 64},
    {"overlap_k": 64, "sink_tokens": 4},
    {"overlap_k": 64, "sink_tokens": 4, "chunk_boundary_window": 32},
)
_QUESTION_TOKENS = 48  # behind the part of a prompt that is cached as its prefix


@dataclass(frozen=True)
class EncodingSettings:
    """How many prompts of which size."""

    prompts: int = 16
    documents: tuple[int, ...] = (4, 8)
    prompt_tokens: int = 1_500
    seed: int = 3


def run(
    open_engine: Callable[..., Any],
    model: str,
    settings: EncodingSettings,
    report: Report = lambda _done, _total, _text: None,
) -> dict[str, Any]:
    """Measure every encoding on every prompt and return the record.

    `open_engine(**options)` opens an engine with room for everything.
    """
    engines = [open_engine(**encoding) for encoding in ENCODINGS]
    tokenizer = engines[0].tokenizer
    found: list[list[dict[str, Measured]]] = [[] for _ in ENCODINGS]
    cases = make_cases(
        tokenizer, groups_of(settings.documents, settings.prompt_tokens), settings.prompts, settings.seed
    )
    for number, case in enumerate(cases):
        report(number, settings.prompts, f"{case.group}, {len(case.prompt.token_ids)} tokens")
        trial = ReuseTrial(engines[0], case.prompt.token_ids)
        for engine, outcomes in zip(engines, found, strict=True):
            outcomes.append(_measure(trial, engine, case))
    report(settings.prompts, settings.prompts, "done")
    return {
        "benchmark": "encoding",
        "model": model,
        "dtype": str(engines[0].model.dtype).removeprefix("torch."),
        "machine": machine_record(engines[0].model.get_input_embeddings().weight.device),
        "settings": asdict(settings),
        "results": [
            {"encoding": encoding, **_summary(outcomes)}
            for encoding, outcomes in zip(ENCODINGS, found, strict=True)
        ],
    }


def _measure(trial: ReuseTrial, engine: Any, case: Case) -> dict[str, Measured]:
    """Reuse as a prefix, not repaired and repaired at the seams, and from elsewhere with guided repair."""
    engine.clear()
    engine.warm(case.prompt.token_ids[:-_QUESTION_TOKENS].tolist())
    measured = {
        "prefix": trial.measure("nothing", 0, engine),
        "prefix_repaired": trial.measure("selective", 0, engine),
    }
    engine.clear()
    for token_ids in case.read_before:
        engine.warm(token_ids)
    measured["moved"] = trial.measure("guided", RATIO, engine)
    engine.clear()
    return measured


def _summary(outcomes: list[dict[str, Measured]]) -> dict[str, Any]:
    return {
        name: {
            "kl_mean": round(statistics.fmean(outcome[name].kl for outcome in outcomes), 6),
            "top1": round(statistics.fmean(outcome[name].top1 for outcome in outcomes), 4),
            "recomputed_tokens": round(
                statistics.fmean(outcome[name].recomputed_tokens for outcome in outcomes)
            ),
        }
        for name in outcomes[0]
    }
