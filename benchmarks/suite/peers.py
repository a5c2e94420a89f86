"""`bench peers`: time to the first token beside other engines, each in an environment of its own.

Hugging Face and kvboost run here; every peer is a process of its own interpreter that speaks JSON lines
(`benchmarks/peers/protocol.py`) and measures from the call to the first token itself. All get the same
prompts and take turns within every round, one at a time. A peer that is not there, crashes or hangs is
listed with the reason. Knows no terminal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.suite.peer_numbers import NOT_PYTHON, OURS, parts_of, quality_of, targets
from benchmarks.suite.peer_process import Participant, PeerFailedError, PeerProcess, Turn
from benchmarks.suite.peer_prompts import PeerSettings, Prompts
from benchmarks.suite.peer_rivals import Local, Reordering
from kvboost.bench.contestants import HandMade, KVBoostCopied, KVBoostWarm, Plain
from kvboost.bench.prefix import spread_rounds
from kvboost.bench.record import machine_record, spread
from kvboost.bench.serve_servers import HTTP_PEER, reason_not_there
from kvboost.choices import SELECTORS
from kvboost.engine import InferenceEngine
from kvboost.loading.embedded import BUILTIN_NAME, ensure_checkpoint, find_gguf

Report = Callable[[int, int, str], None]  # steps done, steps in all, what is being done

KNOWN = {"llama_cpp": "llama.cpp", "kvboost_pypi": "PyPI's kvboost", "vllm": "vLLM (CPU)"}
LOCAL = {
    "plain": "Hugging Face",
    "hand_made": "  reuse by hand",
    "kvboost": "kvboost",
    "kvboost_copied": "  copied",
}
_SPARE_TOKENS = 64


def run(
    engine: InferenceEngine,
    model: str,
    settings: PeerSettings,
    peers_folder: Path,
    report: Report = lambda _done, _total, _text: None,
) -> dict[str, Any]:
    """Measure and return the record. The engine needs `max_chunks=None` and repairs with CacheBlend."""
    machine = machine_record(engine.model.get_input_embeddings().weight.device)
    bench = _Bench(engine, settings, report)
    try:
        bench.start(peers_folder, model)
        lengths = [bench.measure_length(shared) for shared in settings.lengths]
        reordered = bench.measure_reordered() if settings.reordered else None
    finally:
        bench.close()
    return {
        "benchmark": "peers",
        "model": model,
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "machine": machine,
        "settings": dataclasses.asdict(settings),
        "peers": bench.described,
        "unavailable": bench.unavailable,
        "prompts": bench.prompts.count,
        "prompts_that_read_back": bench.prompts.count_that_reads_back,
        "lengths": lengths,
        "reordered": reordered,
        "targets": targets(lengths),
    }


class _Bench:
    """Everybody who takes part, and how far it is."""

    def __init__(self, engine: InferenceEngine, settings: PeerSettings, report: Report) -> None:
        self._engine = engine
        self._settings = settings
        self._report = report
        self._peers: dict[str, PeerProcess] = {}
        self._done = 0
        self.prompts = Prompts(engine.tokenizer, settings)
        self.described: dict[str, dict[str, Any]] = {
            name: {"label": label, "python_peer": name not in OURS} for name, label in LOCAL.items()
        }
        self.unavailable: list[dict[str, str]] = []

    def start(self, folder: Path, model: str) -> None:
        """Start all peers that are there, one after the other, and warm up."""
        settings = self._settings
        gguf = str(find_gguf()) if model == BUILTIN_NAME else None
        checkpoint = str(ensure_checkpoint()) if model == BUILTIN_NAME else model
        documents = settings.documents * settings.document_tokens if settings.reordered else 0
        longest = max(*settings.lengths, documents)
        context_tokens = longest + settings.tail_tokens + settings.new_tokens + _SPARE_TOKENS
        there = {path.name for path in folder.iterdir()} - {HTTP_PEER} if folder.is_dir() else set()
        for name in [*KNOWN, *sorted(there - set(KNOWN))]:
            self._step(f"loading {KNOWN.get(name, name)}", steps=0)
            reason = reason_not_there(folder / name)
            if reason is not None:
                self._drop(name, KNOWN.get(name, name), reason)
                continue
            peer = PeerProcess(
                folder / name,
                self._engine.tokenizer,
                threads=torch.get_num_threads(),
                deadline_s=settings.deadline_s,
            )
            self._peers[name] = peer
            about: dict[str, Any] = {"label": peer.label, "python_peer": name not in NOT_PYTHON}
            self.described[name] = about
            with self._dropping(peer):
                peer.load(checkpoint, gguf, context_tokens)
                about |= peer.description
        self._engine.warm(self.prompts.prefix(max(settings.lengths)))

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    def measure_length(self, shared: int) -> dict[str, Any]:
        """All contestants over one shared beginning, in turns."""
        settings = self._settings
        prefix = self.prompts.prefix(shared)
        model = self._engine.model
        self._step(f"{shared} shared tokens: preparing", steps=0)
        taking_part: list[Participant] = [
            Local(contestant, model)
            for contestant in (
                Plain(model),
                HandMade(model, prefix),
                KVBoostWarm(self._engine, prefix),
                KVBoostCopied(self._engine, prefix),
            )
        ]
        for peer in list(self._peers.values()):
            with self._dropping(peer):
                peer.warm(prefix)
        taking_part += self._peers.values()
        self._round(taking_part[1:], prefix, 2)  # the first answer at a new length pays for fresh memory
        plain_at = spread_rounds(settings.plain_rounds, settings.rounds)
        turns: dict[str, dict[int, Turn]] = {one.name: {} for one in taking_part}
        for number in range(settings.rounds):
            self._step(f"{shared} shared tokens: round {number + 1} of {settings.rounds}")
            first = number % len(taking_part)
            order = taking_part[first:] + taking_part[:first]
            chosen = [one for one in order if one.name != Plain.name or number in plain_at]
            for name, turn in self._round(chosen, prefix, settings.new_tokens).items():
                turns[name][number] = turn
        quality = []
        for number in range(settings.quality_prompts):
            self._step(f"{shared} shared tokens: quality, {number + 1} of {settings.quality_prompts}")
            quality.append(self._round(taking_part, prefix, settings.new_tokens, distribution=True))
        return {
            "shared_tokens": shared,
            "contestants": {
                name: self._outcome(of_one, turns[Plain.name]) | quality_of(name, quality)
                for name, of_one in turns.items()
                if of_one
            },
            "kvboost_profile": self._profile(prefix) if settings.profiled else None,
        }

    def _profile(self, prefix: list[int]) -> dict[str, Any]:
        """Where the time to the first token goes, as means of some requests under torch's profiler."""
        found = []
        for _ in range(self._settings.profiled):
            prompt = self.prompts.behind(prefix)
            self._engine.warm(prefix)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
                result = self._engine.generate(prompt, 1, "prefix_cache")
            found.append(parts_of(profiler.key_averages(), result.ttft_ms))
        return {name: round(statistics.fmean(one[name] for one in found), 2) for name in found[0]}

    def measure_reordered(self) -> dict[str, Any]:
        """Known documents in an order nobody has seen, for those that reuse text anywhere.

        Documents are read one by one before, and new for every prompt.
        """
        settings = self._settings
        model = self._engine.model
        rounds = []
        ours = [
            Reordering(self._engine, selector, ratio)
            for selector in SELECTORS
            for ratio in sorted(settings.ratios)
        ]
        self.described |= {one.name: {**one.about, "python_peer": False} for one in ours}
        for number in range(settings.reordered):
            self._step(f"documents in another order: {number + 1} of {settings.reordered}")
            able = [peer for peer in self._peers.values() if peer.description.get("approximate")]
            documents = self.prompts.documents()
            for document in documents:
                for one in ours:
                    one.warm(document)
                for peer in able:
                    with self._dropping(peer):
                        peer.warm(document)
            taking_part: list[Participant] = [Local(Plain(model), model)]
            taking_part += [Local(one, model) for one in ours]
            taking_part += [peer for peer in able if peer.name in self._peers]
            taking_part = taking_part[number % len(taking_part) :] + taking_part[: number % len(taking_part)]
            prompt = self.prompts.in_another_order(documents)
            rounds.append(self._answers(taking_part, prompt, settings.new_tokens, distribution=True))
        by_name: dict[str, dict[int, Turn]] = {Plain.name: {}}  # plain comes first
        for number, turns in enumerate(rounds):
            for name, turn in turns.items():
                by_name.setdefault(name, {})[number] = turn
        return {
            "documents": settings.documents,
            "document_tokens": settings.document_tokens,
            "contestants": {
                name: self._outcome(of_one, by_name[Plain.name]) | quality_of(name, rounds)
                for name, of_one in by_name.items()
            },
        }

    def _round(
        self, taking_part: Sequence[Participant], prefix: list[int], new_tokens: int, **options: bool
    ) -> dict[str, Turn]:
        """One new prompt behind `prefix`, answered by all who are still there."""
        return self._answers(taking_part, self.prompts.behind(prefix), new_tokens, **options)

    def _answers(
        self, taking_part: Sequence[Participant], prompt: list[int], new_tokens: int, **options: bool
    ) -> dict[str, Turn]:
        turns = {}
        for one in taking_part:
            if isinstance(one, PeerProcess) and one.name not in self._peers:
                continue
            time.sleep(self._settings.pause_s)
            with self._dropping(one):
                turns[one.name] = one.turn(prompt, new_tokens, **options)
        return turns

    def _outcome(self, turns: dict[int, Turn], plain: dict[int, Turn]) -> dict[str, Any]:
        """Times of one contestant, and in how many of plain's rounds it said what plain said."""
        both = [(turn, plain[number]) for number, turn in turns.items() if number in plain]
        reused = [turn.reused_tokens for turn in turns.values() if turn.reused_tokens is not None]
        reported = [turn.reported_ttft_ms for turn in turns.values() if turn.reported_ttft_ms is not None]
        decode = [turn.decode_tokens_per_s for turn in turns.values() if turn.decode_tokens_per_s is not None]
        return {
            "ttft_ms": spread([turn.ttft_ms for turn in turns.values()]),
            "reported_ttft_ms": spread(reported) if reported else None,
            "decode_tokens_per_s": spread(decode) if decode else None,
            "reused_tokens": min(reused) if reused else None,
            "same_tokens_as_plain": sum(self._same(turn, reference) for turn, reference in both),
            "compared_with_plain": len(both),
            "compared_by": "text" if any(turn.token_ids is None for turn in turns.values()) else "token ids",
        }

    def _same(self, turn: Turn, plain: Turn) -> bool:
        if turn.token_ids is not None:
            return turn.token_ids == plain.token_ids
        return bool(turn.text == self._engine.tokenizer.decode(plain.token_ids, skip_special_tokens=True))

    @contextlib.contextmanager
    def _dropping(self, one: Participant) -> Iterator[None]:
        """A peer that fails inside is out from then on, with the reason."""
        try:
            yield
        except PeerFailedError as error:
            peer = self._peers.pop(one.name)
            peer.close()
            self._drop(peer.name, peer.label, str(error))

    def _drop(self, name: str, label: str, reason: str) -> None:
        self.unavailable.append({"name": name, "label": label, "reason": reason})

    def _step(self, text: str, steps: int = 1) -> None:
        settings = self._settings
        total = len(settings.lengths) * (settings.rounds + settings.quality_prompts) + settings.reordered
        self._report(self._done, total, text)
        self._done += steps
