"""`bench peers`: time to the first token beside other engines, each in an environment of its own.

Hugging Face and kvboost run here; every peer is a process of its own interpreter that speaks JSON lines
(`benchmarks/peers/protocol.py`) and measures from the call to the first token itself. All get the same
prompts and take turns within every round, one at a time. A peer that is not there, crashes or hangs is
listed with the reason. Knows no terminal.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import queue
import random
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import torch

from kvboost.bench.contestants import (
    Contestant,
    HandMade,
    KVBoostCopied,
    KVBoostWarm,
    Plain,
    engine_answer,
)
from kvboost.bench.prefix import spread_rounds
from kvboost.bench.record import machine_record
from kvboost.bench.text import TextSource
from kvboost.bench.timing import Answer, Stamps, spread, timed
from kvboost.embedded import BUILTIN_NAME, ensure_checkpoint, find_gguf
from kvboost.engine import InferenceEngine

Report = Callable[[int, int, str], None]  # steps done, steps in all, what is being done

KNOWN = {"llama_cpp": "llama.cpp", "kvboost_pypi": "PyPI's kvboost", "vllm": "vLLM (CPU)"}
LOCAL = {
    "plain": "Hugging Face",
    "hand_made": "  reuse by hand",
    "kvboost": "kvboost",
    "kvboost_copied": "  copied",
}
OURS = ("kvboost", "kvboost_copied")
NOT_PYTHON = ("llama_cpp",)
LONG_TOKENS = 4_096  # from here on the stricter targets hold
MAX_OVER_PYTHON = 1.0
MAX_OVER_NATIVE = 1.25
MAX_OVER_BEST = 1.5
_TRIES = 40  # tails drawn until one reads back
_SPARE_TOKENS = 64
_LAST_WORDS = 300  # characters of a dead peer's log
_CLOSING_S = 10.0


@dataclass(frozen=True)
class PeerSettings:
    """How much is measured. Plain generate is slow, so it takes part in fewer rounds."""

    lengths: tuple[int, ...] = (1_024, 2_048, 4_096)
    rounds: int = 10
    plain_rounds: int = 3
    new_tokens: int = 16
    tail_tokens: int = 20
    quality_prompts: int = 2  # per length, answered by all, not timed
    reordered: int = 3  # prompts of known documents in another order
    documents: int = 8
    document_tokens: int = 512
    pause_s: float = 0.3  # before every turn: the threads of the one before may still spin
    deadline_s: float = 600.0  # for one request to a peer
    seed: int = 0


@dataclass(frozen=True)
class Turn:
    """What came of one prompt. A peer without token ids gives its text."""

    ttft_ms: float
    decode_tokens_per_s: float | None
    token_ids: list[int] | None
    text: str | None = None
    reused_tokens: int | None = None
    reported_ttft_ms: float | None = None  # what the peer itself calls the time to the first token
    logits: torch.Tensor | None = None  # of the first token, `[vocab]`


class Participant(Protocol):
    """Answers prompts, here or in another process."""

    name: str

    def turn(self, prompt: list[int], new_tokens: int, *, distribution: bool = False) -> Turn:
        """Continue `prompt` greedily by exactly `new_tokens`."""


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


# --- peers ---------------------------------------------------------------------------------------


class PeerFailedError(Exception):
    """A peer that cannot go on; the message is the reason."""


class PeerProcess:
    """A peer's process. All that can go wrong with it is a PeerFailedError; past a deadline it is killed."""

    def __init__(self, folder: Path, tokenizer: Any, *, threads: int, deadline_s: float) -> None:
        """Start what `folder/peer.json` names: its label, interpreter, worker script and environment."""
        found = json.loads((folder / "peer.json").read_text())
        self.name = folder.name
        self.label: str = found["label"]
        self.description: dict[str, Any] = {}
        self._tokenizer = tokenizer
        self._threads = threads
        self._deadline_s = deadline_s
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONNOUSERSITE": "1"}
        self._log: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [folder / found["python"], folder / found["worker"]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=folder,
            env=environment | found.get("environment", {}),
            start_new_session=True,  # so that it goes with all its children
        )
        self._replies: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def load(self, model: str, gguf: str | None, context_tokens: int) -> None:
        """Let it load the model; `description` is what it says about itself."""
        started = time.perf_counter()
        self.description = self._ask(
            "load", model=model, gguf=gguf, context_tokens=context_tokens, threads=self._threads
        )
        self.description["load_s"] = round(time.perf_counter() - started, 1)

    def warm(self, token_ids: list[int]) -> None:
        self._ask("warm", token_ids=token_ids, text=self._tokenizer.decode(token_ids))

    def turn(self, prompt: list[int], new_tokens: int, *, distribution: bool = False) -> Turn:
        text = self._tokenizer.decode(prompt)
        self._ask("settle")
        said = self._ask(
            "answer", token_ids=prompt, text=text, new_tokens=new_tokens, distribution=distribution
        )
        decoding_ms = said["total_ms"] - said["ttft_ms"]
        packed = said.get("logits")
        return Turn(
            ttft_ms=said["ttft_ms"],
            decode_tokens_per_s=(new_tokens - 1) * 1e3 / decoding_ms if decoding_ms > 0 else None,
            token_ids=said.get("token_ids"),
            text=said.get("text"),
            reused_tokens=said.get("reused_tokens"),
            reported_ttft_ms=said.get("reported_ttft_ms"),
            logits=_unpacked(packed) if packed else None,
        )

    def close(self) -> None:
        """Ask it to end, and see that it does."""
        with contextlib.suppress(PeerFailedError):
            if self._process.poll() is None:
                self._ask("close", deadline_s=_CLOSING_S)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_CLOSING_S)
        self._kill()
        self._log.close()

    def _ask(self, operation: str, *, deadline_s: float | None = None, **values: Any) -> dict[str, Any]:
        """Send a request and wait for its reply."""
        deadline_s = deadline_s or self._deadline_s
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": operation, **values}) + "\n")
            self._process.stdin.flush()
            line = self._replies.get(timeout=deadline_s)
        except (OSError, ValueError):  # a broken pipe, or one that was closed when it was killed
            line = ""
        except queue.Empty:
            self._kill()
            raise PeerFailedError(f"{operation}: no reply in {deadline_s:g} s") from None
        if not line:
            code = self._process.wait()
            raise PeerFailedError(f"{operation}: ended with exit code {code}{self._last_words()}")
        try:
            reply: dict[str, Any] = json.loads(line)
        except ValueError:
            self._kill()
            raise PeerFailedError(f"{operation}: a reply that is no JSON: {line[:80]!r}") from None
        if "error" in reply:
            raise PeerFailedError(f"{operation}: {' '.join(reply['error'].split())}"[:_LAST_WORDS])
        return reply

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._replies.put(line)
        self._replies.put("")

    def _last_words(self) -> str:
        """The last line of its log."""
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        return f" ({lines[-1][:_LAST_WORDS]})" if lines else ""

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def reason_not_there(folder: Path) -> str | None:
    """Why the peer in `folder` cannot be started; None where it can."""
    if (folder / "peer.json").is_file():
        return None
    note = folder / "unavailable.txt"
    return " ".join(note.read_text().split()) if note.is_file() else "not set up; run make peers"


def _unpacked(packed: str) -> torch.Tensor:
    """`[vocab]` from base64 of little-endian float32."""
    return torch.from_numpy(np.frombuffer(base64.b64decode(packed), dtype="<f4").astype(np.float32))


# --- those that run here -------------------------------------------------------------------------


class Local:
    """A contestant in this process."""

    def __init__(self, contestant: Contestant, model: Any) -> None:
        self.name = contestant.name
        self._contestant = contestant
        self._model = model

    def turn(self, prompt: list[int], new_tokens: int, *, distribution: bool = False) -> Turn:
        self._contestant.settle()
        seen: list[torch.Tensor] = []

        def call(stamps: Stamps) -> Answer:
            watched = _watched(self._model, stamps, seen) if distribution else contextlib.nullcontext()
            with watched:
                return self._contestant.answer(prompt, new_tokens, stamps)

        done = timed(call)
        return Turn(
            done.ttft_ms,
            done.decode_tokens_per_s,
            done.answer.token_ids,
            reused_tokens=done.answer.reused_tokens,
            logits=seen[-1] if seen else None,
        )


class Reordering:
    """kvboost with approximate reuse: documents are found wherever they stand."""

    name = "kvboost"

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine

    def settle(self) -> None:
        """Nothing to do."""

    def answer(self, token_ids: list[int], new_tokens: int, stamps: Stamps) -> Answer:
        return engine_answer(self._engine, token_ids, new_tokens, stamps, mode="chunk_kv_reuse")


@contextlib.contextmanager
def _watched(model: Any, stamps: Stamps, seen: list[torch.Tensor]) -> Iterator[None]:
    """Note the logits of the last position of every forward up to the first token."""

    def note(_model: Any, _inputs: Any, output: Any) -> None:
        if not stamps.times:
            seen.append(output.logits[0, -1].detach().float().cpu().clone())

    hook = model.register_forward_hook(note)
    try:
        yield
    finally:
        hook.remove()


# --- prompts -------------------------------------------------------------------------------------


class Prompts:
    """Prompts that nobody has seen, chosen so that their text gives back their tokens.

    Some peers take text only: so they read the same tokens as the others.
    """

    def __init__(self, tokenizer: Any, settings: PeerSettings) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        self._text = TextSource(tokenizer, max(settings.lengths))
        self._random = random.Random(settings.seed)
        self.count = self.count_that_reads_back = 0

    def prefix(self, tokens: int) -> list[int]:
        return self._text.prefix(tokens)

    def behind(self, prefix: list[int]) -> list[int]:
        """`prefix` and a tail that is new."""
        prompt: list[int] = []
        reads_back = False
        for _ in range(_TRIES):
            prompt = prefix + self._text.fresh(self._settings.tail_tokens)
            if reads_back := self._reads_back(prompt):
                break
        self.count += 1
        self.count_that_reads_back += reads_back
        return prompt

    def documents(self) -> list[list[int]]:
        """New documents, each of which reads back by itself where that can be had."""
        return [self._document() for _ in range(self._settings.documents)]

    def in_another_order(self, documents: Sequence[list[int]]) -> list[int]:
        """The documents one behind the other in a random order, and a new tail."""
        order = self._random.sample(documents, len(documents))
        return self.behind([token for document in order for token in document])

    def _document(self) -> list[int]:
        piece: list[int] = []
        for _ in range(_TRIES):
            piece = self._text.fresh(self._settings.document_tokens)
            if self._reads_back(piece):
                break
        return piece

    def _reads_back(self, token_ids: list[int]) -> bool:
        text = self._tokenizer.decode(token_ids)
        return bool(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] == token_ids)


# --- the benchmark -------------------------------------------------------------------------------


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
        there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
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
                name: self._outcome(of_one, turns[Plain.name]) | _quality_of(name, quality)
                for name, of_one in turns.items()
                if of_one
            },
        }

    def measure_reordered(self) -> dict[str, Any]:
        """Known documents in an order nobody has seen, for those that reuse text anywhere.

        Documents are read one by one before, and new for every prompt.
        """
        settings = self._settings
        model = self._engine.model
        rounds = []
        for number in range(settings.reordered):
            self._step(f"documents in another order: {number + 1} of {settings.reordered}")
            taking_part: list[Participant] = [
                Local(Plain(model), model),
                Local(Reordering(self._engine), model),
            ]
            able = [peer for peer in self._peers.values() if peer.description.get("approximate")]
            documents = self.prompts.documents()
            for document in documents:
                self._engine.warm(document)
                for peer in able:
                    with self._dropping(peer):
                        peer.warm(document)
            taking_part += [peer for peer in able if peer.name in self._peers]
            prompt = self.prompts.in_another_order(documents)
            rounds.append(self._answers(taking_part, prompt, settings.new_tokens, distribution=True))
        by_name: dict[str, dict[int, Turn]] = {}
        for number, turns in enumerate(rounds):
            for name, turn in turns.items():
                by_name.setdefault(name, {})[number] = turn
        return {
            "documents": settings.documents,
            "document_tokens": settings.document_tokens,
            "contestants": {
                name: self._outcome(of_one, by_name[Plain.name]) | _quality_of(name, rounds)
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
            "ttft_ms": dataclasses.asdict(spread([turn.ttft_ms for turn in turns.values()])),
            "reported_ttft_ms": dataclasses.asdict(spread(reported)) if reported else None,
            "decode_tokens_per_s": dataclasses.asdict(spread(decode)) if decode else None,
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


# --- what it comes to ----------------------------------------------------------------------------


def _quality_of(name: str, rounds: Sequence[dict[str, Turn]]) -> dict[str, Any]:
    """Mean KL of the first token's distribution from plain's, in nats, where it is known."""
    found, same = [], 0
    for turns in rounds:
        plain, ours = (turns[who].logits if who in turns else None for who in (Plain.name, name))
        if plain is None or ours is None or len(plain) != len(ours):
            continue
        reference, other = (torch.log_softmax(logits.double(), dim=-1) for logits in (plain, ours))
        found.append(float((reference.exp() * (reference - other)).sum().clamp_min(0)))
        same += int(reference.argmax() == other.argmax())
    return {
        "first_token_kl": float(f"{statistics.fmean(found):.3g}") if found else None,
        "first_token_same": same,
        "first_token_prompts": len(found),
    }


def targets(lengths: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was to be reached, what was, and whether that is enough; only what was measured."""
    found = []
    for item in lengths:
        medians = {name: one["ttft_ms"]["median"] for name, one in item["contestants"].items()}
        ours = medians["kvboost"]
        others = {name: median for name, median in medians.items() if name not in OURS}
        shared = f"{item['shared_tokens']:,}"
        if item["shared_tokens"] < LONG_TOKENS:
            best = min(others, key=lambda name: others[name])
            found.append(_at_most(f"{shared}: kvboost / best ({best})", ours / others[best], MAX_OVER_BEST))
            continue
        for name, median in others.items():
            limit = MAX_OVER_NATIVE if name in NOT_PYTHON else MAX_OVER_PYTHON
            found.append(_at_most(f"{shared}: kvboost / {name}", ours / median, limit))
    return found


def _at_most(name: str, value: float, limit: float) -> dict[str, Any]:
    return {"name": name, "value": round(value, 3), "at_most": limit, "met": value <= limit}
