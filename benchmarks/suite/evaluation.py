"""`bench evaluation`: a few-shot multiple-choice task of lm_eval, by its own model and by kvboost.

Everybody runs the same task through lm_eval's runner, in turns, in one process, on the same weights; kvboost
starts from an empty cache every time. lm_eval's model runs with several batch sizes, and its fastest is the
peer. The clock covers the whole run: tasks, prompts, tokens, scores. Knows no terminal. Needs
`pip install kvboost[eval]`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import json
import logging
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from kvboost.bench.prefix import spread_rounds
from kvboost.bench.record import machine_record, spread
from kvboost.errors import KVBoostError
from kvboost.proof.documents import Shelf
from kvboost.proof.facts import Fact, draw_facts

Report = Callable[[int, int, str], None]  # steps done, steps in all, what is being done
Responses = list[tuple[float, bool]]
OURS = "kvboost"
MIN_SPEEDUP = 3.0
TOLERANCE = 1e-4
CHOICES = 4
_TASK = "kvboost_bench"


@dataclass(frozen=True)
class EvaluationSettings:
    """How much is measured. `passage_tokens` are those of the text before each question.

    lm_eval's own model is slow and takes part in `plain_rounds` of the `rounds`.
    """

    questions: int = 40
    shots: int = 5
    passage_tokens: int = 24
    batch_sizes: tuple[int, ...] = (8, 1)
    rounds: int = 5
    plain_rounds: int = 2
    seed: int = 0


@dataclass
class Contestant:
    """A model for lm_eval, and what came of its runs: seconds, metrics, and the responses to all requests."""

    name: str
    lm: Any
    settle: Callable[[], None]
    seconds: list[float] = dataclasses.field(default_factory=list)
    cpu_seconds: list[float] = dataclasses.field(default_factory=list)  # tells a busy machine from slow code
    metrics: list[dict[str, float]] = dataclasses.field(default_factory=list)
    responses: list[Responses] = dataclasses.field(default_factory=list)

    def run(self, manager: Any, shots: int) -> None:
        """Run the task once, on the clock."""
        from lm_eval import simple_evaluate

        self.settle()
        started, cpu_started = time.perf_counter(), time.process_time()
        results = simple_evaluate(
            model=self.lm, tasks=[_TASK], task_manager=manager, num_fewshot=shots, bootstrap_iters=0
        )
        self.seconds.append(time.perf_counter() - started)
        self.cpu_seconds.append(time.process_time() - cpu_started)
        figures = results["results"][_TASK]
        self.metrics.append({name: value for name, value in figures.items() if isinstance(value, float)})
        samples = sorted(results["samples"][_TASK], key=lambda sample: sample["doc_id"])
        self.responses.append([response for sample in samples for (response,) in sample["resps"]])


def require_lm_eval() -> None:
    """Say what is missing, before there is work."""
    if importlib.util.find_spec("lm_eval") is None:
        raise KVBoostError("bench evaluation needs lm_eval; pip install kvboost[eval]")


def measure(
    engine: Any,
    *,
    model: str = "",
    questions: int = EvaluationSettings.questions,
    shots: int = EvaluationSettings.shots,
    passage_tokens: int = EvaluationSettings.passage_tokens,
    batch_sizes: tuple[int, ...] = EvaluationSettings.batch_sizes,
    rounds: int = EvaluationSettings.rounds,
    plain_rounds: int = EvaluationSettings.plain_rounds,
    seed: int = EvaluationSettings.seed,
    report: Report = lambda _done, _total, _text: None,
) -> dict[str, Any]:
    """Run the task with everybody, in turns, and return the record. The engine's cache is emptied."""
    require_lm_eval()
    settings = EvaluationSettings(questions, shots, passage_tokens, batch_sizes, rounds, plain_rounds, seed)
    from lm_eval.api.instance import Instance

    machine = machine_record(engine.model.get_input_embeddings().weight.device)
    with tempfile.TemporaryDirectory(prefix="kvboost-bench-") as folder, _quiet():
        manager = _write_task(Path(folder), engine.tokenizer, settings)
        contestants = _contestants(engine, settings)
        for contestant in contestants:  # what is done only once is nobody's time
            contestant.lm.loglikelihood = functools.partial(contestant.lm.loglikelihood, disable_tqdm=True)
            contestant.lm.loglikelihood([Instance("loglikelihood", {}, ("The sky is", " blue"), 0)])
        turns = _turns(contestants, settings)
        for done, (number, contestant) in enumerate(turns):
            report(done, len(turns), f"round {number + 1} of {settings.rounds}, {contestant.name}")
            contestant.run(manager, settings.shots)
    engine.clear()
    results = _results(contestants)
    return {
        "benchmark": "evaluation",
        "model": model,
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "machine": machine,
        "versions": _versions(),
        "settings": dataclasses.asdict(settings),
        "results": results,
        "targets": targets(results),
    }


def _contestants(engine: Any, settings: EvaluationSettings) -> list[Contestant]:
    """lm_eval's own model with every batch size, then ours."""
    from lm_eval.models.huggingface import HFLM

    from kvboost.integrations.lm_eval import KVBoostLM

    found = [
        Contestant(
            f"hf, batch size {size}",
            HFLM(pretrained=engine.model, tokenizer=engine.tokenizer, batch_size=size),
            lambda: None,
        )
        for size in settings.batch_sizes
    ]
    return [*found, Contestant(OURS, KVBoostLM(engine), engine.clear)]


def _turns(contestants: list[Contestant], settings: EvaluationSettings) -> list[tuple[int, Contestant]]:
    """Who runs in which round; everybody is first in turn."""
    slow_rounds = spread_rounds(settings.plain_rounds, settings.rounds)
    turns = []
    for number in range(settings.rounds):
        taking_part = contestants if number in slow_rounds else contestants[-1:]
        first = number % len(taking_part)
        turns += [(number, contestant) for contestant in taking_part[first:] + taking_part[:first]]
    return turns


# --- the task ------------------------------------------------------------------------------------


def _write_task(folder: Path, tokenizer: Any, settings: EvaluationSettings) -> Any:
    """Write the task's files into `folder`; returns a task manager that knows only this task."""
    from lm_eval.tasks import TaskManager

    docs = make_questions(tokenizer, settings)
    files = {}
    for split, part in (("validation", docs[: settings.shots]), ("test", docs[settings.shots :])):
        path = folder / f"{split}.jsonl"
        path.write_text("".join(json.dumps(doc) + "\n" for doc in part or docs[:1]), encoding="utf-8")
        files[split] = str(path)
    task = {
        "task": _TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": files, "cache_dir": str(folder / "datasets")},
        "test_split": "test",
        "fewshot_split": "validation",
        "fewshot_config": {"sampler": "first_n"},
        "output_type": "multiple_choice",
        "doc_to_text": "{{passage}}\nQuestion: {{question}}\nAnswer:",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [
            {"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")
        ],
        "metadata": {"version": 1},
    }
    (folder / "task.yaml").write_text(json.dumps(task), encoding="utf-8")  # JSON is YAML
    return TaskManager(include_path=str(folder), include_defaults=False)


def make_questions(tokenizer: Any, settings: EvaluationSettings) -> list[dict[str, Any]]:
    """Examples and questions: a passage with a fact in it, a question about it, four short sentences."""
    random = Random(settings.seed)
    count = settings.shots + settings.questions
    tokens = settings.passage_tokens
    shelf = Shelf(tokenizer, tokens * 3 // 4, tokens * 5 // 4, settings.seed)
    facts = [fact for start in range(0, count, 100) for fact in draw_facts(min(100, count - start), random)]
    return [_question(passage, fact, random) for passage, fact in zip(shelf.take(count), facts, strict=True)]


def _question(passage: str, fact: Fact, random: Random) -> dict[str, Any]:
    others = [number for number in random.sample(range(1_000, 10_000), CHOICES) if number != fact.number]
    numbers = [fact.number, *others[: CHOICES - 1]]
    random.shuffle(numbers)
    return {
        "passage": f"{' '.join(passage.split())} {fact.sentence}",
        "question": fact.question,
        "choices": [f"It is {number}." for number in numbers],
        "answer": numbers.index(fact.number),
    }


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the bars and warnings of lm_eval and datasets: they would run through the caller's bar."""
    import datasets
    from lm_eval.api import task

    logger = logging.getLogger("lm_eval")
    level, had_bars, bar = logger.level, not datasets.are_progress_bars_disabled(), task.tqdm
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    task.tqdm = lambda docs, **_options: docs
    try:
        yield
    finally:
        task.tqdm = bar
        logger.setLevel(level)
        if had_bars:
            datasets.enable_progress_bars()


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {"lm_eval": version("lm_eval")}


# --- what it comes to ----------------------------------------------------------------------------


def _results(contestants: Sequence[Contestant]) -> dict[str, Any]:
    """Seconds and metrics of everybody, and kvboost next to the fastest of the others."""
    *others, ours = contestants
    peer = min(others, key=lambda each: statistics.median(each.seconds))
    compared = [(mine, his) for mine in ours.responses for each in others for his in each.responses]
    difference = max(_difference(mine, his) for mine, his in compared)
    return {
        "contestants": {
            each.name: {
                "seconds": spread(each.seconds),
                "cpu_seconds": spread(each.cpu_seconds),
                "metrics": each.metrics[-1],
            }
            for each in contestants
        },
        "peer": peer.name,
        "speedup": round(statistics.median(peer.seconds) / statistics.median(ours.seconds), 2),
        "requests": len(ours.responses[0]),
        "largest_difference": difference,
        "same_scores": difference <= TOLERANCE
        and all(metrics == peer.metrics[0] for each in contestants for metrics in each.metrics)
        and all([greedy for _, greedy in mine] == [greedy for _, greedy in his] for mine, his in compared),
        "prompt_tokens": ours.lm.prompt_tokens,
        "cached_tokens": ours.lm.cached_tokens,
    }


def _difference(ours: Responses, others: Responses) -> float:
    """The largest, of one log-likelihood."""
    if any(math.isnan(value) for value, _ in [*ours, *others]):
        return math.inf
    return max(abs(value - other) for (value, _), (other, _) in zip(ours, others, strict=True))


def targets(results: dict[str, Any]) -> list[dict[str, Any]]:
    """What was to be reached, what was, and whether that is enough."""
    speedup, difference = results["speedup"], results["largest_difference"]
    return [
        {
            "name": f"{results['peer']} / kvboost",
            "value": speedup,
            "at_least": MIN_SPEEDUP,
            "met": speedup >= MIN_SPEEDUP,
        },
        {
            "name": "largest difference of a log-likelihood",
            "value": difference,
            "at_most": TOLERANCE,
            "met": results["same_scores"],
        },
    ]
