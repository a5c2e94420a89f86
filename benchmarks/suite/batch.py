"""`bench batch`: prompts with one long beginning, answered together, against other ways to answer them.

One process, one model, the same prompts for all, contestants taking turns within every round. The
beginning is known to those that can reuse it; the tails are new in every round. Also says how much
memory the KV of a larger batch takes, beside a copy of the beginning for every row. Knows no terminal.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvboost.bench.prefix import spread_rounds
from kvboost.bench.record import machine_record, spread
from kvboost.bench.text import TextSource
from kvboost.engine import InferenceEngine
from kvboost.kv.arena import Arena
from kvboost.run import decode

Report = Callable[[int, int, str], None]
Prompts = list[list[int]]
Answers = list[list[int]]

# On a CPU and on a GPU, where steps are captured when they come again.
SLOW = {
    False: ("hugging_face", "batch_cold"),
    True: ("hugging_face", "continuous", "one_by_one", "batch_cold"),
}
_WARM_UPS = {False: 1, True: 3}  # rounds
_WARM_UP_PROMPTS = 2  # in which those that are slow answer few


@dataclass(frozen=True)
class BatchSettings:
    """How much is measured. Those that are slow take part in fewer rounds."""

    batch: int = 8
    prefixes: int = 1
    prefix_tokens: int = 2_000
    shortest_tail: int = 5
    longest_tail: int = 200
    new_tokens: int = 16
    rounds: int = 5
    plain_rounds: int = 2
    memory_batch: int = 16
    seed: int = 0


class Contestants:
    """Ways to answer prompts that share a prefix; each returns the new tokens of every prompt."""

    def __init__(self, engine: InferenceEngine, prefixes: Prompts, new_tokens: int) -> None:
        self._engine = engine
        self._model = engine.model
        self._prefixes = prefixes
        self._prefix = prefix = prefixes[0]
        self._options: dict[str, Any] = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
        self._cold = 0
        self._prefix_arena = Arena(engine.layout, len(prefix))
        self.settle()
        with decode.running(self._model, fast=True):
            decode.prefill(self._model, torch.tensor(prefix).numpy(), self._prefix_arena, len(prefix))

    @property
    def ways(self) -> list[str]:
        """Those that there are here."""
        ways = ["hugging_face", "expanded", "one_by_one", "batch", "batch_cold"]
        if len(self._prefixes) > 1:
            ways.remove("expanded")
        if self._model.device.type == "cuda" and hasattr(self._model, "generate_batch"):
            ways.insert(1, "continuous")
        return ways

    def continuous(self, prompts: Prompts) -> Answers:
        """transformers' own continuous batching, over a paged cache."""
        config = copy.deepcopy(self._model.generation_config)
        config.update(max_new_tokens=self._options["max_new_tokens"], do_sample=False, eos_token_id=-1)
        outputs = self._model.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
        found = {tuple(each.prompt_ids): list(each.generated_tokens) for each in outputs.values()}
        return [found[tuple(prompt)] for prompt in prompts]

    def hugging_face(self, prompts: Prompts) -> Answers:
        """The model's own generate over all prompts, padded on the left."""
        longest = max(map(len, prompts))
        return self._generate(prompts, lambda prompt: (0, longest - len(prompt)))

    def expanded(self, prompts: Prompts) -> Answers:
        """The prefix copied for every row, tails padded between it and them, on our kernels."""
        arena = self.expanded_arena(prompts)
        longest, shared = max(map(len, prompts)), len(self._prefix)
        with decode.running(self._model, fast=True):
            return self._generate(
                prompts, lambda prompt: (shared, longest - len(prompt)), past_key_values=arena
            )

    def expanded_arena(self, prompts: Prompts) -> Arena:
        """An arena with the prefix in every row, and room for the longest prompt and its answer."""
        shared = len(self._prefix)
        capacity = max(map(len, prompts)) + int(self._options["max_new_tokens"])
        arena = Arena(self._engine.layout, capacity, batch=len(prompts))
        for slab, source in zip(arena.slabs, self._prefix_arena.slabs, strict=True):
            slab[:, :, :shared] = source
        arena.set_length(shared)
        return arena

    def one_by_one(self, prompts: Prompts) -> Answers:
        """`generate`, prompt after prompt, with the prefix in the cache."""
        return [
            self._engine.generate(prompt, mode="prefix_cache", **self._options).token_ids
            for prompt in prompts
        ]

    def batch(self, prompts: Prompts, **options: Any) -> Answers:
        """`generate_batch`, with the prefix in the cache."""
        results = self._engine.generate_batch(prompts, **self._options, **options)
        return [result.token_ids for result in results]

    def batch_cold(self, prompts: Prompts) -> Answers:
        """`generate_batch` on text that nobody has read: the prefix is computed once."""
        self._cold += 1
        return self.batch(prompts, cache_salt=f"cold {self._cold}")

    def settle(self) -> None:
        """Outside the clock: the last request began with the same prefix, and no tail is stored."""
        self._engine.clear()
        for prefix in reversed(self._prefixes):
            self._engine.warm(prefix)

    def _generate(
        self, prompts: Prompts, padding: Callable[[list[int]], tuple[int, int]], **options: Any
    ) -> Answers:
        """Generate over prompts padded to one length; `padding` says where, and by how much."""
        device = self._model.get_input_embeddings().weight.device
        ids, mask = [], []
        for prompt in prompts:
            at, count = padding(prompt)
            ids.append(prompt[:at] + [prompt[0]] * count + prompt[at:])
            mask.append([1] * at + [0] * count + [1] * (len(prompt) - at))
        inputs = torch.tensor(ids, device=device)
        with torch.no_grad():
            output = self._model.generate(
                inputs,
                attention_mask=torch.tensor(mask, device=device),
                do_sample=False,
                **self._options,
                **options,
            )
        answers: Answers = output[:, inputs.shape[1] :].tolist()
        return answers


def run(
    engine: InferenceEngine,
    model: str,
    settings: BatchSettings,
    report: Report = lambda _done, _total, _text: None,
) -> dict[str, Any]:
    """Measure and return the record; `report` hears how far it is.

    The engine's cache needs room for everything: open it with `max_chunks=None`.
    """
    machine = machine_record(engine.model.get_input_embeddings().weight.device)
    text = TextSource(engine.tokenizer, settings.prefix_tokens)
    others = [text.fresh(settings.prefix_tokens) for _ in range(settings.prefixes - 1)]
    prefixes = [text.prefix(settings.prefix_tokens), *others]
    report(0, settings.rounds, "reading the shared beginning")
    contestants = Contestants(engine, prefixes, settings.new_tokens)
    draw = random.Random(settings.seed)

    def prompts(count: int) -> Prompts:
        return [
            prefixes[number * len(prefixes) // count]
            + text.fresh(draw.randint(settings.shortest_tail, settings.longest_tail))
            for number in range(count)
        ]

    ways = contestants.ways
    times: dict[str, list[float]] = {name: [] for name in ways}
    equal = dict.fromkeys(ways, 0)
    compared = dict.fromkeys(ways, 0)
    slow_at = spread_rounds(settings.plain_rounds, settings.rounds)
    on_gpu = engine.model.device.type == "cuda"
    for number in range(-_WARM_UPS[on_gpu], settings.rounds):  # the first rounds warm up those that are fast
        asked = prompts(settings.batch if number >= 0 or on_gpu else _WARM_UP_PROMPTS)
        answers: dict[str, Answers] = {}
        for name in ways:
            warms_up = number < 0 and name in ("one_by_one", "batch_cold")
            if name in SLOW[on_gpu] and number not in slow_at and not warms_up:
                continue
            report(max(number, 0), settings.rounds, name.replace("_", " "))
            contestants.settle()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            started = time.perf_counter()
            few = warms_up and name == "one_by_one"
            answers[name] = getattr(contestants, name)(asked[:_WARM_UP_PROMPTS] if few else asked)
            if number >= 0:
                times[name].append(time.perf_counter() - started)
        for name, found in answers.items() if number >= 0 and "one_by_one" in answers else ():
            compared[name] += len(asked)
            equal[name] += sum(a == b for a, b in zip(found, answers["one_by_one"], strict=True))
    report(settings.rounds, settings.rounds, "memory")
    # The engine counts its largest batch, so this one must be that.
    memory = _memory(engine, contestants, prompts(max(settings.memory_batch, settings.batch)))
    return _record(model, engine, machine, settings, times, (equal, compared), memory)


def _memory(engine: InferenceEngine, contestants: Contestants, prompts: Prompts) -> dict[str, Any]:
    """Bytes of KV that a batch allocates, ours and with a copy per row."""
    contestants.settle()
    contestants.batch(prompts)
    ours = engine.cache_stats()["batches"]["largest_kv_bytes"]
    copied = contestants.expanded_arena(prompts).nbytes
    return {
        "rows": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "kv_bytes": ours,
        "kv_bytes_expanded": copied,
        "ratio": round(ours / copied, 3),
    }


def _record(
    model: str,
    engine: InferenceEngine,
    machine: dict[str, Any],
    settings: BatchSettings,
    times: dict[str, list[float]],
    agreement: tuple[dict[str, int], dict[str, int]],
    memory: dict[str, Any],
) -> dict[str, Any]:
    equal, compared = agreement
    middle = {name: statistics.median(values) for name, values in times.items()}
    results = {
        name: {
            "seconds": spread(values),
            "prompts_per_s": round(settings.batch / middle[name], 3),
            "tokens_per_s": round(settings.batch * settings.new_tokens / middle[name], 1),
            "same_answers": equal[name],
            "answers": compared[name],
        }
        for name, values in times.items()
    }
    ratios = {
        f"throughput_over_{name}": round(middle[name] / middle["batch"], 2)
        for name in ("hugging_face", "continuous", "expanded", "one_by_one")
        if name in middle
    }
    ratios["cold_throughput_over_hugging_face"] = round(middle["hugging_face"] / middle["batch_cold"], 2)
    targets = [
        _at_least("throughput / Hugging Face, padded batch", ratios["throughput_over_hugging_face"], 6.0),
        _at_least("throughput / one by one with reuse", ratios["throughput_over_one_by_one"], 1.5),
        {
            "name": f"KV bytes / expand and write, {memory['rows']} rows",
            "value": memory["ratio"],
            "at_most": 0.4,
            "met": memory["ratio"] <= 0.4,
        },
    ]
    if (over := ratios.get("throughput_over_continuous")) is not None:
        targets.append(_at_least("throughput / transformers' continuous batching", over, 15.0))
    return {
        "benchmark": "batch",
        "model": model,
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "machine": machine,
        "settings": dataclasses.asdict(settings),
        "results": results,
        "ratios": ratios,
        "memory": memory,
        "targets": targets,
    }


def _at_least(name: str, value: float, limit: float) -> dict[str, Any]:
    return {"name": name, "value": value, "at_least": limit, "met": value >= limit}
