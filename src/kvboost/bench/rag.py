"""`bench rag`: time to the first token when known documents come back in another order.

Three parts: documents and a question against BASELINE and exact reuse, contestants taking
turns within every round; prompts that share nothing with the cache, in pairs with BASELINE; and a chat
over reordered documents next to the same chat with exact hits. All times are the engine's
`ttft_ms`, wall time with everything inside. Knows no terminal.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from kvboost.bench.record import at_least, at_most, head_of, pair_ratios, spread
from kvboost.choices import SELECTORS, GenerationMode, Origin
from kvboost.models import GenerationResult
from kvboost.proof.documents import Document, DocumentPrompt, PromptWriter, Shelf, message

Report = Callable[[int, int, str], None]  # steps done, steps in all, what is being done
OpenEngine = Callable[..., Any]  # an engine with these options on the model that is measured
BASELINE, EXACT_ONLY = "baseline", "prefix cache"
MIN_SPEEDUPS = {0.10: 5.0, 0.15: 4.0}  # of guided over BASELINE
GPU_MIN_SPEEDUPS = {  # by where KV lies and by tokens
    ("model", 8_000): {0.10: 3.5, 0.15: 2.8},
    ("model", 32_000): {0.10: 5.0, 0.15: 4.0},
    ("cpu", 8_000): {0.10: 2.8},
    ("cpu", 32_000): {0.10: 4.0},
}
_WARM_UPS = {
    False: 0,
    True: 3,
}  # rounds, on a CPU and on a GPU, where steps are captured when they come again
MAX_WRONG_GUESS = 1.05
MAX_CHAT_OVER_EXACT = 1.15
_NEW_TOKENS = 2


@dataclass(frozen=True)
class RagSettings:
    """How much is measured. `prompt_tokens` are those of all documents together."""

    documents: int = 8
    prompt_tokens: int = 4_000
    ratios: tuple[float, ...] = (0.10, 0.15)
    selectors: tuple[str, ...] = SELECTORS
    rounds: int = 5
    pairs: int = 15
    cold_tokens: int = 1_000
    chats: int = 3
    turns: int = 5
    answer_tokens: int = 8
    seed: int = 0


@dataclass
class Contestant:
    """One way to serve a prompt, and what came of it."""

    name: str
    mode: GenerationMode
    engine: Any
    results: list[GenerationResult] = dataclasses.field(default_factory=list)

    def answer(self, documents: Sequence[Document], writer: PromptWriter, prompt: DocumentPrompt) -> None:
        """Answer `prompt` with a cache that holds the documents, each read alone, and nothing else."""
        self.engine.clear()
        if self.mode is not GenerationMode.BASELINE:
            for document in documents:
                self.engine.warm(writer.read_by_itself(document))
        self.results.append(_ask(self.engine, prompt.token_ids.tolist(), self.mode))
        self.engine.clear()


def run(
    engine: Any,
    model: str,
    settings: RagSettings,
    open_engine: OpenEngine,
    report: Report = lambda _done, _total, _text: None,
) -> dict[str, Any]:
    """Measure the three parts and return the record; `report` hears what is being done.

    `engine` serves BASELINE and exact reuse; `open_engine` opens the others on its model.
    """
    bench = _Bench(engine, settings, open_engine, report)
    on_gpu = engine.model.get_input_embeddings().weight.device.type == "cuda"
    home = engine.core.parts.settings.cache_device if on_gpu else None
    head = {**head_of(record_name(home, settings), engine, model, settings), "cache_device": home}
    contestants = bench.shuffled_documents()
    wrong_guess = bench.wrong_guesses() if settings.pairs else None
    chat = bench.chats() if settings.chats and getattr(engine.tokenizer, "chat_template", None) else None
    bench.close()
    return {
        **head,
        "contestants": contestants,
        "wrong_guess": wrong_guess,
        "chat": chat,
        "targets": targets(contestants, wrong_guess, chat, settings, min_speedups(home, settings)),
    }


def record_name(home: str | None, settings: RagSettings) -> str:
    """What the record is called: on a GPU, by where KV is kept and by the length of prompts."""
    if home is None:
        return "rag"
    return f"rag-{settings.prompt_tokens}" if home == "model" else f"rag-host-{settings.prompt_tokens}"


def min_speedups(home: str | None, settings: RagSettings) -> dict[float, float]:
    """Of guided over BASELINE, by ratio."""
    return MIN_SPEEDUPS if home is None else GPU_MIN_SPEEDUPS.get((home, settings.prompt_tokens), {})


class _Bench:
    """The texts, the engines and the progress that the parts share."""

    def __init__(self, engine: Any, settings: RagSettings, open_engine: OpenEngine, report: Report) -> None:
        self._settings = settings
        self._report = report
        self._done = 0
        self._random = Random(settings.seed)
        self._writer = PromptWriter(engine.tokenizer)
        each = settings.prompt_tokens // settings.documents
        self._shelf = Shelf(engine.tokenizer, each * 9 // 10, each * 11 // 10, settings.seed)
        pieces_per_cold_prompt = -(-settings.cold_tokens * 10 // (9 * each))
        self._warm_ups = _WARM_UPS[engine.model.get_input_embeddings().weight.device.type == "cuda"]
        self._cold_prompts = settings.pairs + max(1, self._warm_ups)
        pieces = self._shelf.take(settings.documents + self._cold_prompts * pieces_per_cold_prompt)
        self._documents = self._writer.documents(pieces[: settings.documents], self._random)
        self._cold_pieces = pieces[settings.documents :]
        self._tokenizer = engine.tokenizer
        self._contestants = [
            Contestant(BASELINE, GenerationMode.BASELINE, engine),
            Contestant(EXACT_ONLY, GenerationMode.PREFIX_CACHE, engine),
        ]
        for ratio in settings.ratios:
            for selector in settings.selectors:
                opened = open_engine(selector=selector, recompute_ratio=ratio)
                name = contestant_name(selector, ratio)
                self._contestants.append(Contestant(name, GenerationMode.CHUNK_KV_REUSE, opened))

    def close(self) -> None:
        for contestant in self._contestants[2:]:
            contestant.engine.close()

    def _step(self, text: str) -> None:
        settings = self._settings
        total = settings.rounds * len(self._contestants) + settings.pairs + settings.chats * settings.turns
        self._report(min(self._done, total), total, text)
        self._done += 1

    # --- documents in another order ------------------------------------------------------------

    def shuffled_documents(self) -> dict[str, Any]:
        """Every round another order and another question, the same for all."""
        settings = self._settings
        for number in range(-self._warm_ups, settings.rounds):
            if number == 0:
                for contestant in self._contestants:
                    contestant.results.clear()
            order = self._random.sample(self._documents, len(self._documents))
            prompt = self._writer.prompt(order, self._documents[number % len(self._documents)].fact)
            first = number % len(self._contestants)
            for contestant in self._contestants[first:] + self._contestants[:first]:
                if number >= 0:
                    self._step(f"round {number + 1} of {settings.rounds}, {contestant.name}")
                contestant.answer(self._documents, self._writer, prompt)
        baseline = self._contestants[0].results
        return {contestant.name: _outcome(contestant.results, baseline) for contestant in self._contestants}

    # --- nothing in common with the cache ------------------------------------------------------

    def wrong_guesses(self) -> dict[str, Any]:
        """Prompts that share no text with what is cached, in pairs with BASELINE."""
        settings = self._settings
        engine = self._contestants[2].engine
        engine.clear()
        for document in self._documents:
            engine.warm(self._writer.read_by_itself(document))
        modes = (GenerationMode.BASELINE, GenerationMode.CHUNK_KV_REUSE)
        times: dict[GenerationMode, list[float]] = {mode: [] for mode in modes}
        cached = 0
        warm_ups = self._cold_prompts - settings.pairs
        for pair in range(-warm_ups, settings.pairs):
            if pair >= 0:
                self._step(f"nothing in common: pair {pair + 1} of {settings.pairs}")
            token_ids = self._cold_ids(pair + warm_ups)
            for mode in modes if pair % 2 else reversed(modes):
                result = _ask(engine, token_ids, mode)
                if pair >= 0:
                    times[mode].append(result.ttft_ms)
                    cached += result.cached_tokens
        engine.clear()
        baseline, ours = (times[mode] for mode in modes)
        return {
            "pairs": settings.pairs,
            "prompt_tokens": settings.cold_tokens,
            "cached_tokens": cached,
            "baseline_ttft_ms": spread(baseline),
            "ttft_ms": spread(ours),
            **pair_ratios(ours, baseline),
        }

    def _cold_ids(self, number: int) -> list[int]:
        """The ids of the `number`-th prompt that nobody has seen."""
        each = len(self._cold_pieces) // self._cold_prompts
        text = "\n\n".join(self._cold_pieces[number * each : (number + 1) * each])
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return list(ids[: self._settings.cold_tokens])

    # --- a chat --------------------------------------------------------------------------------

    def chats(self) -> list[dict[str, Any]]:
        """A record per turn: a chat over reordered documents, and one whose first prompt was read before."""
        settings = self._settings
        approximate = self._contestants[2].engine
        exact = self._contestants[0].engine
        turns: list[list[dict[str, Any]]] = [[] for _ in range(settings.turns)]
        for _ in range(settings.chats):
            order = self._random.sample(self._documents, len(self._documents))
            facts = [document.fact for document in self._random.sample(order, len(order))]
            opening = {"role": "user", "content": message(order, facts[0].question)}
            approximate.clear()
            exact.clear()
            for document in self._documents:
                approximate.warm(self._writer.read_by_itself(document))
            exact.warm([opening])
            talks: tuple[list[dict[str, str]], ...] = ([opening], [opening])
            for number, turn in enumerate(turns):
                self._step(f"chat: turn {number + 1} of {settings.turns}")
                results = []
                for talker, messages in zip((approximate, exact), talks, strict=True):
                    if number:
                        messages.append({"role": "user", "content": facts[number % len(facts)].question})
                    mode = GenerationMode.PREFIX_CACHE if talker is exact else GenerationMode.CHUNK_KV_REUSE
                    result = _ask(talker, messages, mode, settings.answer_tokens)
                    messages.append({"role": "assistant", "content": result.output_text})
                    results.append(result)
                turn.append({"approximate": results[0], "exact": results[1]})
        approximate.clear()
        exact.clear()
        return [_turn_record(number, turn) for number, turn in enumerate(turns, start=1)]


def contestant_name(selector: str, ratio: float) -> str:
    """How a selector at a ratio is called in the record."""
    return f"{selector} {ratio:.0%}"


def _ask(engine: Any, prompt: Any, mode: GenerationMode, new_tokens: int = _NEW_TOKENS) -> GenerationResult:
    result: GenerationResult = engine.generate(prompt, new_tokens, mode=mode, min_new_tokens=new_tokens)
    return result


# --- what it comes to ----------------------------------------------------------------------------


def _outcome(results: Sequence[GenerationResult], baseline: Sequence[GenerationResult]) -> dict[str, Any]:
    """Times and shares of one contestant, and in how many rounds it began with BASELINE's token."""
    times = [result.ttft_ms for result in results]
    return {
        "ttft_ms": spread(times),
        "speedup": round(statistics.median(r.ttft_ms for r in baseline) / statistics.median(times), 2),
        "prompt_tokens": round(statistics.fmean(result.prompt_tokens for result in results)),
        "cached_share": _share(results, lambda result: result.cached_tokens),
        "recomputed_share": _share(results, lambda result: result.recomputed_tokens),
        "same_first_token": sum(
            ours.token_ids[:1] == other.token_ids[:1] for ours, other in zip(results, baseline, strict=True)
        ),
        "rounds": len(results),
    }


def _share(results: Sequence[GenerationResult], tokens: Callable[[GenerationResult], int]) -> float:
    """Of all prompt tokens."""
    return round(sum(map(tokens, results)) / sum(result.prompt_tokens for result in results), 4)


def _turn_record(number: int, turn: Sequence[dict[str, GenerationResult]]) -> dict[str, Any]:
    """Medians over the chats; tokens by where their KV came from."""
    record: dict[str, Any] = {"turn": number}
    for kind in ("approximate", "exact"):
        results = [results[kind] for results in turn]
        record[kind] = {
            "ttft_ms": spread([result.ttft_ms for result in results]),
            "prompt_tokens": round(statistics.median(result.prompt_tokens for result in results)),
            "recomputed_tokens": max(result.recomputed_tokens for result in results),
            "origins": {
                origin.value: round(statistics.median(_tokens_of(result, origin) for result in results))
                for origin in Origin
            },
        }
    return record


def _tokens_of(result: GenerationResult, origin: Origin) -> int:
    return sum(span.length for span in result.spans if span.origin is origin)


# --- what was to be reached ----------------------------------------------------------------------


def targets(
    contestants: dict[str, Any],
    wrong_guess: dict[str, Any] | None,
    chat: Sequence[dict[str, Any]] | None,
    settings: RagSettings,
    least: dict[float, float] = MIN_SPEEDUPS,
) -> list[dict[str, Any]]:
    """What was to be reached, what was, and whether that is enough; only what was measured."""
    found = []
    for ratio in settings.ratios:
        guided, deviation = (contestants.get(contestant_name(s, ratio)) for s in ("guided", "deviation"))
        if guided is not None and ratio in least:
            found.append(at_least(f"baseline / guided {ratio:.0%}", guided["speedup"], least[ratio]))
        if guided is not None and deviation is not None:
            slower = deviation["ttft_ms"]["median"] / guided["ttft_ms"]["median"]
            found.append(at_least(f"deviation / guided at {ratio:.0%}", slower, 1.0))
    if wrong_guess is not None:
        found.append(
            at_most("nothing in common / baseline", wrong_guess["ratio_of_medians"], MAX_WRONG_GUESS)
        )
    if chat is not None and len(chat) > 1:
        later = chat[1:]
        slowest = max(t["approximate"]["ttft_ms"]["median"] / t["exact"]["ttft_ms"]["median"] for t in later)
        repaired = max(turn["approximate"]["recomputed_tokens"] for turn in later)
        found.append(at_most("chat, slowest later turn / exact hits", slowest, MAX_CHAT_OVER_EXACT))
        found.append(at_most("chat, tokens repaired in later turns", repaired, 0))
    return found
