"""A quality budget instead of a ratio: how much has to be computed again to stay below an error.

A short self-run measures, on documents found again at other places, the error of approximate reuse at
several ratios; the result is kept per model in the cache folder. Whoever asks for `max_kl` then gets the
smallest ratio that held it, or none. Knows how to measure and to keep, not what an engine does with it.
"""

from __future__ import annotations

import json
import os
import statistics
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from kvboost.environment import cache_folder
from kvboost.errors import CacheFileError, InvalidRequestError
from kvboost.proof.documents import groups_of, make_cases
from kvboost.proof.fresh_engine import ReusesText, fresh_engine
from kvboost.proof.quality import Measured, ReuseTrial

RATIOS = (0.05, 0.10, 0.15, 0.20, 0.30, 0.50)
DEFAULT_PROMPTS = 12
_DOCUMENTS = (4, 8)
_PROMPT_TOKENS = 1_600
_MIN_PROMPT_TOKENS = 400
_SEED = 71_993  # not that of the benchmarks: their prompts are held out
_FORMAT = "kvboost-calibration"
_VERSION = 1
Report = Callable[[int, int], None]


@dataclass(frozen=True)
class Calibration:
    """The error of approximate reuse by ratio: mean KL divergence, of the worse way of caching."""

    model: str
    family: str
    selector: str
    errors: Mapping[float, float]
    prompts: int
    measured_at: str

    def ratio_for(self, max_kl: float) -> float | None:
        """The smallest ratio whose error, and that of all larger ones, was at most `max_kl`; None = none."""
        fitting: float | None = None
        for ratio in sorted(self.errors, reverse=True):
            if not self.errors[ratio] <= max_kl:  # not a number is no bound held
                break
            fitting = ratio
        return fitting


def calibrate(engine: Any, prompts: int, report: Report) -> Calibration:
    """Measure on an engine like `engine`, whose own cache is left alone; keep the result, and let it hold."""
    if refusal := engine.core.parts.approximation.refusal(0, calibrating=True):
        raise InvalidRequestError(f"there is nothing to calibrate: {refusal}")
    with fresh_engine(engine, recompute_ratio=0.15, max_kl=None) as fresh:
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
    if prompts < len(_DOCUMENTS) * 2:
        raise InvalidRequestError(f"calibration needs at least {len(_DOCUMENTS) * 2} prompts, got {prompts}")
    tokens = _PROMPT_TOKENS if max_positions is None else min(_PROMPT_TOKENS, max_positions // 2)
    if tokens < _MIN_PROMPT_TOKENS:
        raise InvalidRequestError(
            f"calibration needs a model with at least {2 * _MIN_PROMPT_TOKENS} positions, "
            f"this one has {max_positions}"
        )
    ratios = tuple(ratios)
    errors: dict[str, dict[float, list[float]]] = {}
    cases = make_cases(engine.tokenizer, groups_of(_DOCUMENTS, tokens), prompts, _SEED)
    for number, case in enumerate(cases):
        report(number, prompts)
        engine.clear()
        for token_ids in case.read_before:
            engine.warm(token_ids)
        trial = ReuseTrial(engine, case.prompt.token_ids)
        way = errors.setdefault(case.group.partition("-")[0], {ratio: [] for ratio in ratios})
        for ratio in ratios:
            measured: Measured = trial.measure(selector, ratio)
            way[ratio].append(measured.kl)
    engine.clear()
    report(prompts, prompts)
    return Calibration(
        model=model,
        family=engine.namespace("").family,
        selector=selector,
        errors={ratio: max(statistics.fmean(way[ratio]) for way in errors.values()) for ratio in ratios},
        prompts=prompts,
        measured_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def path_of(family: str, selector: str) -> Path:
    """Where the calibration of a model and encoding is kept."""
    return cache_folder() / "calibration" / f"{family[:32]}-{selector}.json"


def save(calibration: Calibration) -> Path:
    """Keep `calibration` in the cache folder, in one step."""
    path = path_of(calibration.family, calibration.selector)
    path.parent.mkdir(parents=True, exist_ok=True)
    errors = {f"{ratio:g}": error for ratio, error in sorted(calibration.errors.items())}
    document = {"format": _FORMAT, "version": _VERSION, **asdict(calibration), "errors": errors}
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        temporary.write_text(json.dumps(document, indent=2) + "\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def load(family: str, selector: str) -> Calibration | None:
    """The calibration of this model and encoding, or None where there is none."""
    path = path_of(family, selector)
    try:
        document = json.loads(path.read_text())
        if (document["format"], document["version"]) != (_FORMAT, _VERSION):
            return None
        errors = {float(ratio): float(error) for ratio, error in document["errors"].items()}
        if not all(0 <= ratio <= 1 for ratio in errors):
            raise ValueError(f"ratios must be from 0 to 1, got {sorted(errors)}")
        found = Calibration(
            model=str(document["model"]),
            family=str(document["family"]),
            selector=str(document["selector"]),
            errors=errors,
            prompts=int(document["prompts"]),
            measured_at=str(document["measured_at"]),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CacheFileError(
            f"{path} cannot be read as a calibration ({error}); remove it and run kvboost calibrate again"
        ) from error
    return found if (found.family, found.selector) == (family, selector) else None
