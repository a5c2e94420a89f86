"""`bench agents`: chats of agents in which text moves, and what each way of serving makes of it.

Turn by turn, BASELINE, exact reuse and approximate reuse get the same prompt, in another order every time;
each has a cache of its own. What the cache of approximate reuse makes of earlier facts is asked before the
prompt is served, against full prefill. All times are the engine's `ttft_ms`, wall time with everything
inside. Knows no terminal.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.suite.agent_chats import CASES, CHANGE, TURNS, AgentTurn, Stage
from benchmarks.suite.agent_trials import FullPrefill, reuse
from kvboost.bench.record import at_least, at_most, head_of, spread
from kvboost.choices import GenerationMode, Origin
from kvboost.models import GenerationResult
from kvboost.proof.facts import Needle

Report = Callable[[int, int, str], None]
OpenEngine = Callable[..., Any]
BASELINE, EXACT_ONLY, REUSE = "baseline", "exact_only", "reuse"
MODES = {
    BASELINE: GenerationMode.BASELINE,
    EXACT_ONLY: GenerationMode.PREFIX_CACHE,
    REUSE: GenerationMode.CHUNK_KV_REUSE,
}
MIN_PROMPT_TOKENS = 3_000
MIN_MOVED_REUSED = 0.9
MIN_SPEEDUP = 4.0
MIN_FACTS_KEPT = 0.8
MAX_LATER_OVER_EXACT = 1.1


@dataclass(frozen=True)
class AgentSettings:
    """How much is measured. BASELINE serves every turn in `baseline_rounds` rounds, else only the change."""

    cases: tuple[str, ...] = tuple(CASES)
    rounds: int = 3
    moved_tokens: int = 3_200
    thought_words: int = 60
    answer_tokens: int = 12
    baseline_rounds: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Asked:
    """One question for an earlier fact: was it in the answer of full prefill, and in that of reuse?"""

    full: bool
    reuse: bool


@dataclass
class Served:
    """One turn of one round."""

    turn: AgentTurn
    results: dict[str, GenerationResult] = field(default_factory=dict)
    kl: list[float] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)


def run(
    engine: Any,
    model: str,
    settings: AgentSettings,
    open_engine: OpenEngine,
    report: Report = lambda _done, _total, _text: None,
) -> dict[str, Any]:
    """Measure all cases and return the record; `report` hears what is being done.

    `engine` serves BASELINE and exact reuse; `open_engine` opens another one on its model.
    """
    head = head_of("agents", engine, model, settings)
    ours = open_engine()
    bench = _Bench(engine, ours, settings, report)
    cases = {case: _case_record(bench.rounds(case)) for case in settings.cases}
    recompute_ratio = ours.settings.recompute_ratio
    ours.close()
    return {
        **head,
        "recompute_ratio": recompute_ratio,
        "cases": cases,
        "targets": [target for case, found in cases.items() for target in targets(case, found)],
    }


class _Bench:
    """The engines, the texts and the progress that the cases share."""

    def __init__(self, exact: Any, ours: Any, settings: AgentSettings, report: Report) -> None:
        self._engines = {BASELINE: exact, EXACT_ONLY: exact, REUSE: ours}
        self._settings = settings
        self._report = report
        self._stage = Stage(exact.tokenizer, settings.moved_tokens, settings.thought_words, settings.seed)
        self._full = FullPrefill(exact.model)
        self._done = 0

    def rounds(self, case: str) -> list[list[Served]]:
        """All rounds of a case, turn by turn."""
        return [list(self._round(case, number)) for number in range(self._settings.rounds)]

    def _round(self, case: str, number: int) -> Iterator[Served]:
        self._clear()
        for place, turn in enumerate(self._stage.chat(case, number)):
            self._step(f"{case}: round {number + 1} of {self._settings.rounds}, turn {place + 1}")
            served = Served(turn)
            if place >= CHANGE:
                self._ask(served)
            names = [EXACT_ONLY, REUSE]
            if place == CHANGE or number < self._settings.baseline_rounds:
                names.append(BASELINE)
            first = (place + number) % len(names)
            for name in names[first:] + names[:first]:
                served.results[name] = self._serve(name, turn)
            yield served
        self._clear()

    def _clear(self) -> None:
        for engine in self._engines.values():
            engine.clear()
        self._full.clear()

    def _step(self, text: str) -> None:
        total = len(self._settings.cases) * self._settings.rounds * TURNS
        self._report(self._done, total, text)
        self._done += 1

    def _serve(self, name: str, turn: AgentTurn) -> GenerationResult:
        found: GenerationResult = self._engines[name].generate(turn.token_ids.tolist(), 1, mode=MODES[name])
        return found

    def _ask(self, served: Served) -> None:
        """Compare answers over our store with full prefill's: at the change to all questions."""
        turn = served.turn
        prompts: list[tuple[np.ndarray, Needle | None]] = [
            (each.token_ids, each.fact) for each in turn.questions
        ]
        for token_ids, fact in prompts or [(turn.token_ids, turn.asked)]:
            full = self._full.read(token_ids, self._settings.answer_tokens)
            ours = reuse(self._engines[REUSE], token_ids, full)
            served.kl.append(ours.kl)
            if fact is not None:
                answers = (self._text(ids) for ids in (full.answer_ids, ours.answer_ids))
                served.asked.append(Asked(*(fact.is_in(answer) for answer in answers)))

    def _text(self, ids: list[int]) -> str:
        return str(self._engines[REUSE].tokenizer.decode(ids))


# --- what it comes to ----------------------------------------------------------------------------


def _case_record(rounds: Sequence[Sequence[Served]]) -> dict[str, Any]:
    """A row per turn over all rounds, and what became of the facts."""
    turns = [
        {"turn": number, **_turn_record(served)}
        for number, served in enumerate(zip(*rounds, strict=True), start=1)
    ]
    at_change = [asked for served in rounds for asked in served[CHANGE].asked]
    later = [asked for served in rounds for each in served[CHANGE + 1 :] for asked in each.asked]
    return {
        "turns": turns,
        "repaired_twice": max(_repaired_twice(served) for served in rounds),
        "facts": _facts(at_change),
        "later_facts": _facts(later),
    }


def _turn_record(served: Sequence[Served]) -> dict[str, Any]:
    """Medians over the rounds; of shares the mean."""
    ours = [each.results[REUSE] for each in served]
    moved = [len(each.turn.moved) for each in served]
    errors = [error for each in served for error in each.kl]
    record: dict[str, Any] = {
        "prompt_tokens": round(statistics.median(result.prompt_tokens for result in ours)),
        "fewest_prompt_tokens": min(result.prompt_tokens for result in ours),
        "moved_tokens": round(statistics.median(moved)),
        "moved_reused": min(_moved_reused(each) for each in served) if min(moved) else None,
        "origins": {
            origin.value: round(statistics.median(len(_positions(result, origin)) for result in ours))
            for origin in Origin
        },
        "kl": float(f"{statistics.fmean(errors):.4g}") if errors else None,
        "ttft_ms": {},
    }
    for name in MODES:
        times = [each.results[name].ttft_ms for each in served if name in each.results]
        record["ttft_ms"][name] = spread(times) if times else None
    pairs = [(each.results[EXACT_ONLY].ttft_ms, each.results[REUSE].ttft_ms) for each in served]
    record["sooner"] = round(statistics.median(exact / own for exact, own in pairs), 3)
    return record


def _moved_reused(served: Served) -> float:
    """The share of the moved tokens that was found."""
    live = _positions(served.results[REUSE], Origin.LIVE)
    return round(1 - len(np.intersect1d(served.turn.moved, live)) / len(served.turn.moved), 4)


def _repaired_twice(served: Sequence[Served]) -> int:
    """How many tokens were repaired after the change that were there, and in the cache, at the change."""
    settled = len(served[CHANGE].turn.token_ids)
    return max(
        sum(position < settled for position in _positions(each.results[REUSE], Origin.RECOMPUTED))
        for each in served[CHANGE + 1 :]
    )


def _positions(result: GenerationResult, origin: Origin) -> list[int]:
    """The prompt positions of one origin."""
    spans = (span for span in result.spans if span.origin is origin)
    return [position for span in spans for position in range(span.start, span.end)]


def _facts(asked: Sequence[Asked]) -> dict[str, Any]:
    """How many facts full prefill knew, how many reuse did, and how many of the former it kept."""
    known = [each for each in asked if each.full]
    return {
        "asked": len(asked),
        "full_prefill": len(known),
        "reuse": sum(each.reuse for each in asked),
        "kept": sum(each.reuse for each in known),
        "kept_share": round(sum(each.reuse for each in known) / len(known), 4) if known else None,
    }


# --- what was to be reached ----------------------------------------------------------------------


def targets(case: str, found: dict[str, Any]) -> list[dict[str, Any]]:
    """What was to be reached in a case, what was, and whether that is enough."""
    change, later = found["turns"][CHANGE], found["turns"][CHANGE + 1 :]
    slowest = max(1 / turn["sooner"] for turn in later)
    made = [
        at_least(f"{case}: prompt tokens at the change", change["fewest_prompt_tokens"], MIN_PROMPT_TOKENS),
        at_least(f"{case}: moved tokens reused", change["moved_reused"], MIN_MOVED_REUSED),
        at_least(f"{case}: exact only / reuse at the change", change["sooner"], MIN_SPEEDUP),
        at_most(f"{case}: slowest later turn / exact only", slowest, MAX_LATER_OVER_EXACT),
        at_most(f"{case}: tokens repaired twice", found["repaired_twice"], 0),
    ]
    if found["facts"]["kept_share"] is not None:
        made.append(at_least(f"{case}: facts kept", found["facts"]["kept_share"], MIN_FACTS_KEPT))
    return made
