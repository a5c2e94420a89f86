"""A quality budget instead of a ratio: how much has to be computed again to stay below an error.

A short self-run measures, on documents found again at other places, the error of approximate reuse at
several ratios and the facts that are kept. The result lies in the cache folder, per model. Whoever asks for
`max_kl` or `min_facts` then gets the smallest ratio that held them, or none. Knows how to measure and to
keep, not what an engine does with it.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from kvboost.environment import cache_folder
from kvboost.errors import CacheFileError, InvalidRequestError
from kvboost.proof.documents import needle_cases
from kvboost.proof.fresh_engine import ReusesText, fresh_engine
from kvboost.proof.needles import measure_facts
from kvboost.proof.quality import strategy_of

_log = logging.getLogger(__name__)
RATIOS = (0.05, 0.10, 0.15, 0.20, 0.30, 0.50)
DEFAULT_PROMPTS = 12
_LEAST_PROMPTS = 4
LEAST_QUESTIONS = 8  # that full prefill answers, before a share of them says anything
_DOCUMENTS = (4, 6, 8)
_PROMPT_TOKENS = 1_600
_MIN_PROMPT_TOKENS = 400
_SEED = 71_993  # not that of the benchmarks: their prompts are held out
_FORMAT = "kvboost-calibration"
_VERSION = 2
Report = Callable[[int, int], None]


@dataclass(frozen=True)
class Calibration:
    """The error of approximate reuse by ratio, of the worse way of reading: mean KL divergence.

    `facts` are the shares of `questions` that full prefill answers and that are still answered; without any
    such question it is empty.
    """

    model: str
    family: str
    selector: str
    errors: Mapping[float, float]
    prompts: int
    measured_at: str
    facts: Mapping[float, float] = field(default_factory=dict)
    questions: int = 0

    def ratio_for(self, max_kl: float | None, min_facts: float | None = None) -> float | None:
        """The smallest ratio that, with all larger ones, held both bounds; None = none did."""
        fitting: float | None = None
        for ratio in sorted(self.errors, reverse=True):
            # not a number is no bound held
            if max_kl is not None and not self.errors[ratio] <= max_kl:
                break
            if min_facts is not None and not self._keeps(ratio, min_facts):
                break
            fitting = ratio
        return fitting

    def _keeps(self, ratio: float, min_facts: float) -> bool:
        return self.questions >= LEAST_QUESTIONS and self.facts.get(ratio, 0.0) >= min_facts


def bounds_text(max_kl: float | None, min_facts: float | None) -> str:
    """What is asked for, in words."""
    asked = {"max_kl": max_kl, "min_facts": min_facts}
    return " and ".join(f"{name}={bound:g}" for name, bound in asked.items() if bound is not None)


def calibrate(engine: Any, prompts: int, report: Report) -> Calibration:
    """Measure on an engine like `engine`, whose own cache is left alone; keep the result, and let it hold."""
    if refusal := engine.core.parts.approximation.refusal(0, calibrating=True):
        raise InvalidRequestError(f"there is nothing to calibrate: {refusal}")
    with fresh_engine(engine, recompute_ratio=0.15, max_kl=None, min_facts=None) as fresh:
        of, most = (engine.core.parts.model_name, engine.settings.selector), engine.max_positions
        found = measure(fresh, *of, prompts=prompts, max_positions=most, report=report)
    save(found)
    engine.core.parts.use_calibration(found)
    return found


def measure(
    engine: ReusesText,
    model: str,
    selector: str,
    *,
    prompts: int = DEFAULT_PROMPTS,
    ratios: Iterable[float] = RATIOS,
    max_positions: int | None = None,
    report: Report = lambda _done, _total: None,
) -> Calibration:
    """Run the prompts through `engine`, whose cache is cleared for it."""
    if prompts < _LEAST_PROMPTS:
        raise InvalidRequestError(f"calibration needs at least {_LEAST_PROMPTS} prompts, got {prompts}")
    tokens = _PROMPT_TOKENS if max_positions is None else min(_PROMPT_TOKENS, max_positions // 2)
    if tokens < _MIN_PROMPT_TOKENS:
        raise InvalidRequestError(
            f"calibration needs a model with at least {2 * _MIN_PROMPT_TOKENS} positions, "
            f"this one has {max_positions}"
        )
    repairs = {f"{ratio:g}": strategy_of(selector, ratio) for ratio in ratios}
    cases = needle_cases(engine.tokenizer, _DOCUMENTS, tokens, _SEED)
    scores = measure_facts(engine, repairs, cases, questions=prompts, only_answered=False, report=report)
    errors = {
        float(name): max(statistics.fmean(of_way[name]) for of_way in scores.errors.values())
        for name in repairs
    }
    facts = {float(name): share for name in repairs if (share := scores.least_share(name)) is not None}
    return Calibration(
        model=model,
        family=engine.namespace("").family,
        selector=selector,
        errors=errors,
        prompts=prompts,
        measured_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        facts=facts,
        questions=scores.answered,
    )


def path_of(family: str, selector: str) -> Path:
    """Where the calibration of a model and encoding is kept."""
    return cache_folder() / "calibration" / f"{family[:32]}-{selector}.json"


def save(calibration: Calibration) -> Path:
    """Keep `calibration` in the cache folder, in one step."""
    path = path_of(calibration.family, calibration.selector)
    path.parent.mkdir(parents=True, exist_ok=True)
    errors, facts = (
        {f"{ratio:g}": value for ratio, value in sorted(by_ratio.items())}
        for by_ratio in (calibration.errors, calibration.facts)
    )
    document = {
        "format": _FORMAT,
        "version": _VERSION,
        **asdict(calibration),
        "errors": errors,
        "facts": facts,
    }
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        temporary.write_text(json.dumps(document, indent=2) + "\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _log.info("calibrated %s with %d prompts, kept in %s", calibration.model, calibration.prompts, path)
    return path


def load(family: str, selector: str) -> Calibration | None:
    """The calibration of this model and encoding, or None where there is none."""
    path = path_of(family, selector)
    try:
        document = json.loads(path.read_text())
        if (document["format"], document["version"]) != (_FORMAT, _VERSION):
            return None
        errors, facts = (
            {float(ratio): float(value) for ratio, value in document[name].items()}
            for name in ("errors", "facts")
        )
        if not all(0 <= ratio <= 1 for ratio in (*errors, *facts)):
            raise ValueError(f"ratios must be from 0 to 1, got {sorted(errors)}")
        found = Calibration(
            model=str(document["model"]),
            family=str(document["family"]),
            selector=str(document["selector"]),
            errors=errors,
            prompts=int(document["prompts"]),
            measured_at=str(document["measured_at"]),
            facts=facts,
            questions=int(document["questions"]),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CacheFileError(
            f"{path} cannot be read as a calibration ({error}); remove it and run kvboost calibrate again"
        ) from error
    return found if (found.family, found.selector) == (family, selector) else None
