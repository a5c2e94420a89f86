"""The state machine: requests in random order on a model that changes, each compared with the model itself.

A rule is a request or a change. What a request answers must be what the engine's own model object generates
at this moment, and it must leave the model as it found it. `Machine.groups` names the rules that take part.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from transformers import LogitsProcessor, LogitsProcessorList

from kvboost import GenerationMode, GenerationResult, KVBoost
from kvboost.choices import Origin
from kvboost.errors import CacheFileError, InvalidRequestError, PartialResultsError
from kvboost.requests.request import Request
from kvboost.reuse.costs import CostEstimate
from kvboost.server.worker import Worker
from tests.checked_requests import read_request
from tests.fuzz import reference
from tests.fuzz.reference import Stock, Tally
from tests.fuzz.subject import CHANGES, FACTORS, KINDS, TARGETS, Subject, ambient, build, is_autocast
from tests.tiny_models import random_ids, tiny_tokenizer

REQUESTS = (
    "generate",
    "options",
    "sample",
    "baseline",
    "approximate",
    "stream",
    "batch",
    "score",
    "chat",
    "prepare",
    "scheduler",
    "warm",
    "pins",
    "explain",
    "clear",
    "save",
    "disk",
    "engines",
    "concurrent",
    "ambient",
)
GROUPS = frozenset((*REQUESTS, *CHANGES))
BETWEEN = ("weights", "partial", "adapters", "buffers", "hooks", "flags", "dtype", "attention")  # two results
WITHIN = ("weights", "partial", "adapters", "buffers", "hooks")  # two tokens of one request
CHECK_SECONDS = 0.1
ALTERED_STEPS = 5
PREFIX = GenerationMode.PREFIX_CACHE
WORDS = ("Why is the sky blue?", "And the sea?", "Thanks.", "Tell me more, please.", "No.")
BASES = tuple(random_ids(80, seed) for seed in (1, 2, 3))
OPTIONS: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.3},
    {"num_beams": 2},
    {"prompt_lookup_num_tokens": 2},
    {"assistant_early_exit": 1},
    {"min_new_tokens": 3},
    {"no_repeat_ngram_size": 2},
    {"suppress_tokens": [3, 4]},
    {"use_cache": False},
    {"guidance_scale": 1.5},
)


def chosen_groups() -> frozenset[str]:
    """The groups named in KVBOOST_FUZZ_RULES, or all."""
    named = os.environ.get("KVBOOST_FUZZ_RULES", "")
    groups = frozenset(filter(None, named.split(",")))
    if unknown := groups - GROUPS:
        raise ValueError(f"KVBOOST_FUZZ_RULES names {sorted(unknown)}; there are {sorted(GROUPS)}")
    return groups or GROUPS


def chosen_kinds() -> tuple[str, ...]:
    """The models named in KVBOOST_FUZZ_MODELS, or all."""
    return tuple(filter(None, os.environ.get("KVBOOST_FUZZ_MODELS", "").split(","))) or KINDS


# --- what is drawn ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    """A prompt to be: of `kind`, from text number `base`, cut at `cut`, with a tail of its own."""

    kind: str
    base: int
    cut: int
    tail: int


@dataclass(frozen=True)
class Alter:
    """A change to be."""

    group: str
    way: str
    target: str
    factor: float


def asks(
    kinds: tuple[str, ...] = ("ids", "ids", "more", "more", "moved", "chat", "text"),
) -> st.SearchStrategy[Ask]:
    return st.builds(
        Ask,
        kind=st.sampled_from(kinds),
        base=st.integers(0, 2),
        cut=st.sampled_from((80, 64, 48, 40, 33, 20, 16, 7, 1)),
        tail=st.integers(0, 6),
    )


def alters(*groups: str) -> st.SearchStrategy[Alter]:
    return st.sampled_from([(group, way) for group in groups for way in CHANGES[group]]).flatmap(
        lambda pair: st.builds(
            Alter, st.just(pair[0]), st.just(pair[1]), st.sampled_from(TARGETS), st.sampled_from(FACTORS)
        )
    )


def balanced(*groups: str) -> st.SearchStrategy[Alter]:
    """Changes, each group as likely as another."""
    return st.sampled_from(groups).flatmap(alters)


NEW_TOKENS = st.integers(1, 6)
WHICH = st.integers(0, 1)
AROUND = st.sampled_from(("", "", "", "inference_mode", "no_grad", "autocast"))


def needs(*groups: str) -> Callable[[Any], Any]:
    """The rule takes part only where all its groups do."""
    return precondition(lambda self: self.groups.issuperset(groups) and self.engines)


def step(**strategies: st.SearchStrategy[Any]) -> Callable[[Any], Any]:
    """A rule that the machine remembers, so that an example can be run again without hypothesis."""

    def decorate(function: Any) -> Any:
        @wraps(function)
        def remembered(self: Any, **drawn: Any) -> None:
            self.note(function.__name__, drawn)
            function(self, **drawn)

        return rule(**strategies)(remembered)

    return decorate


# --- what is remembered ----------------------------------------------------------------------------


@dataclass
class Opened:
    """An engine, what it was opened with, and the dtype that the model had then."""

    engine: KVBoost
    options: dict[str, Any]
    dtype: torch.dtype
    scheduler: Any = None
    joined: list[Joined] = field(default_factory=list)


def served(engine: KVBoost, requests: list[Request]) -> list[GenerationResult]:
    """The answers of a server's worker, which all requests reach at once."""

    async def answers() -> list[GenerationResult]:
        worker = Worker(engine, max_sequences=3, batch_tokens=2_000)
        try:
            tickets = [worker.submit(request) for request in requests]
            for ticket in tickets:
                async for _ in ticket:
                    pass
            return [ticket.result for ticket in tickets]
        finally:
            await asyncio.to_thread(worker.close, 10.0)

    return asyncio.run(answers())


class Joined:
    """A request in the running batch: what it has heard, and how much of it was checked."""

    def __init__(self, ids: list[int], is_simple: bool) -> None:
        self.ids = ids
        self.is_simple = is_simple  # greedy, and nothing else
        self.tokens: list[int] = []
        self.checked = 0
        self.result: GenerationResult | None = None
        self.error: Exception | None = None

    def token(self, token_id: int) -> None:
        self.tokens.append(token_id)

    def done(self, result: GenerationResult) -> None:
        self.result = result

    def failed(self, error: Exception) -> None:
        self.error = error


class AtToken(LogitsProcessor):
    """Calls `act` once, between two forwards of a request."""

    def __init__(self, at: int, act: Callable[[], None]) -> None:
        self._left = at
        self._act = act

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        if self._left == 0:
            self._act()
        self._left -= 1
        return scores


class Machine(RuleBasedStateMachine):
    """One model, up to two engines on it, and all that can be asked of them."""

    groups: ClassVar[frozenset[str]] = GROUPS
    kinds: ClassVar[tuple[str, ...]] = KINDS
    resident: ClassVar[bool] = False  # single requests run in the engine's own batch, as they do on a GPU
    tally: ClassVar[Tally] = Tally()

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[str, dict[str, Any]]] = []
        self.engines: list[Opened] = []
        self.subject: Subject
        self.sibling: KVBoost | None = None
        self.folder = Path(tempfile.mkdtemp(prefix="kvboost-fuzz-"))
        self.tokenizer = tiny_tokenizer()
        self.history: list[list[int]] = []
        self.chats: list[list[dict[str, str]]] = [[], [], []]
        self.unnoticed = False  # a part of a weight was written to, and the engines need not know yet
        self._threads = torch.get_num_threads()
        # Prompts this short would be computed: then nothing would ever be repaired.
        self._always = mock.patch.object(CostEstimate, "pays", property(lambda _self: True))
        self._always.start()
        self._altered_for = 0

    def note(self, name: str, drawn: dict[str, Any]) -> None:
        """Remember a step. What keeps KV from being reused ends after some steps."""
        self.steps.append((name, drawn))
        self.tally.steps += 1
        if self.engines and self.subject.is_altered:
            self._altered_for += 1
        else:
            self._altered_for = 0
        if self._altered_for > ALTERED_STEPS:
            self.subject.settle()

    # --- engines -----------------------------------------------------------------------------

    @initialize(
        kind=st.integers(0, len(KINDS) - 1),
        chunk_size=st.sampled_from((8, 16)),
        on_disk=st.booleans(),
        timed=st.booleans(),
    )
    def begin(self, kind: int, chunk_size: int, on_disk: bool, timed: bool) -> None:
        self.note("begin", {"kind": kind, "chunk_size": chunk_size, "on_disk": on_disk, "timed": timed})
        torch.set_num_threads(1)
        self.tally.examples += 1
        self.subject = Subject(self.kinds[kind % len(self.kinds)])
        options: dict[str, Any] = {"chunk_size": chunk_size, "max_chunks": None}
        if timed:
            options["weights_check_seconds"] = CHECK_SECONDS
        if on_disk and "disk" in self.groups:
            options["disk_cache_dir"] = str(self.folder / "disk")
        self._open(self.subject.inner, options)

    def _open(self, model: Any, options: dict[str, Any]) -> None:
        known = inspect.signature(KVBoost.__init__).parameters
        usable = {name: value for name, value in options.items() if name in known}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="PeftModel is not among the tested")
            engine = KVBoost(model, self.tokenizer, **usable)
        if self.resident:
            engine.core.resident.exists = True
        self.engines.append(Opened(engine, options, self.subject.dtype))

    def _pick(self, which: int) -> Opened:
        return self.engines[which % len(self.engines)]

    @property
    def can_open(self) -> bool:
        return not self.subject.is_foreign and not self.unnoticed

    @needs("engines")
    @precondition(lambda self: len(self.engines) < 2 and self.can_open)
    @step(
        chunk_size=st.sampled_from((8, 16)),
        max_chunks=st.sampled_from((None, 6)),
        bit_exact=st.booleans(),
        packed=st.sampled_from((None, False)),
        of_adapters=st.booleans(),
    )
    def open_second(
        self, chunk_size: int, max_chunks: int | None, bit_exact: bool, packed: bool | None, of_adapters: bool
    ) -> None:
        if len(self.engines) > 1 or not self.can_open:
            return
        adapted = self.subject.adapted if of_adapters else None
        options = {"chunk_size": chunk_size, "max_chunks": max_chunks, "bit_exact": bit_exact}
        with self._unharmed():
            self._open(
                self.subject.inner if adapted is None else adapted, {**options, "pack_weights": packed}
            )

    @needs("engines")
    @precondition(lambda self: self.can_open)
    @step(which=WHICH)
    def reopen(self, which: int) -> None:
        if not self.can_open:
            return
        opened = self._pick(which)
        opened.engine.close()
        self.engines.remove(opened)
        with self._unharmed():
            self._open(opened.engine.model, opened.options)

    # --- prompts -----------------------------------------------------------------------------

    def _prompt(self, engine: KVBoost, ask: Ask) -> tuple[Any, list[int]]:
        """What to pass to the engine, and the ids that the model is to read."""
        tail = random_ids(ask.tail, 50 + ask.tail)
        if ask.kind == "text":
            text = " ".join(WORDS[: ask.base + 1]) + "x" * ask.tail
            return text, list(self.tokenizer(text)["input_ids"])
        if ask.kind == "chat" and "chat" in self.groups:
            messages = [*self.chats[ask.base], {"role": "user", "content": WORDS[ask.tail % len(WORDS)]}]
            return messages, self._chat_ids(engine, messages)
        if ask.kind == "moved":
            ids = [*random_ids(1 + ask.tail, 90 + ask.tail), *BASES[ask.base][: max(40, ask.cut)], *tail, 5]
            return ids, ids
        if ask.kind == "more" and self.history:
            before = self.history[ask.base % len(self.history)]
            ids = before[: max(1, len(before) - ask.cut // 16)] + tail
        else:
            ids = BASES[ask.base][: ask.cut] + tail
        return ids, ids

    def _chat_ids(self, engine: KVBoost, messages: list[dict[str, str]]) -> list[int]:
        """The ids that the engine reads: the template's text, with its special tokens and no others."""
        ids = engine.tokenize(messages)
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        plain = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        special = frozenset(self.tokenizer.all_special_ids)
        assert self.tokenizer.decode(ids) == text, "the ids of a chat are not the template's text"
        assert [each for each in ids if each in special] == [each for each in plain if each in special], (
            "the ids of a chat have other special tokens than the template"
        )
        return ids

    def _remember(self, ask: Ask, prompt: Any, ids: list[int], result: GenerationResult) -> None:
        if ask.kind == "chat" and isinstance(prompt[0], dict):
            chat = [*prompt, {"role": "assistant", "content": result.output_text}]
            self.chats[ask.base] = chat if len(ids) < 200 else []
        if len(ids) < 150:
            self.history = [*self.history[-2:], ids + result.token_ids]

    # --- comparing ---------------------------------------------------------------------------

    @property
    def _is_open_question(self) -> bool:
        """Whether no answer can be compared now."""
        return self.unnoticed or self.subject.is_random

    def _stock(self, engine: KVBoost, ids: list[int], new_tokens: int, **options: Any) -> Stock | None:
        """What the model itself says; None where nothing can be compared."""
        with torch.random.fork_rng():
            stock = reference.answer(engine.model, ids, new_tokens, **options)
        self.tally.stock_fails += stock.error is not None
        return None if self._is_open_question and stock.error is None else stock

    def _check(
        self,
        opened: Opened,
        ids: list[int],
        result: GenerationResult,
        stock: Stock | None,
        new_tokens: int,
        **options: Any,
    ) -> None:
        """Compare an answer with the model's own, and what was reused with what may be now."""
        self._check_answer(opened, ids, result, stock, new_tokens, **options)
        self._check_plain(opened, result)

    def _check_answer(
        self,
        opened: Opened,
        ids: list[int],
        result: GenerationResult,
        stock: Stock | None,
        new_tokens: int,
        **options: Any,
    ) -> None:
        assert result.prompt_tokens == len(ids)
        assert [result.spans[0].start, result.spans[-1].end] == [0, len(ids)]
        if stock is None or stock.error is not None:
            self.tally.only_later += 1
        else:
            self.tally.checks += 1
            self.tally.hits += result.cached_tokens > 0
            given = result.token_ids
            if given != stock.token_ids:
                tie = reference.is_near_tie(
                    opened.engine.model, ids, stock.token_ids, given, new_tokens, **options
                )
                assert tie, f"kvboost: {given}, the model itself: {stock.token_ids} ({_origins(result)})"
                self.tally.near_ties += 1

    def _check_plain(self, opened: Opened, result: Any) -> None:
        """Where the model computes in a way that is in no weight, nothing may be reused."""
        if self.subject.is_foreign or opened.dtype is not self.subject.dtype:
            assert result.cached_tokens == 0, f"reused while the model is not its own: {_origins(result)}"
            assert {span.origin for span in result.spans} == {Origin.LIVE}

    @contextlib.contextmanager
    def _unharmed(self) -> Iterator[None]:
        """What happens inside leaves the model and torch as they were."""
        before = self.subject.fingerprint()
        yield
        after = self.subject.fingerprint()
        for name, value in before.items():
            assert after[name] == value, f"{name}: {value} before, {after[name]} after"

    def _ask(self, call: Callable[[], Any], *stocks: Stock | None, may_refuse: bool = False) -> Any:
        """What `call` gives; None where it may fail and does: stock fails too, or it refuses an option."""
        try:
            with self._unharmed():
                return call()
        except InvalidRequestError:
            if not may_refuse:
                raise
            self.tally.refused += 1
        except Exception:  # what the model itself cannot answer either
            if not any(stock is not None and stock.error is not None for stock in stocks):
                raise
        return None

    @invariant()
    def stores_are_sound(self) -> None:
        for opened in self.engines:
            opened.engine.cache_manager.check_integrity()

    # --- single requests ---------------------------------------------------------------------

    def _generate(
        self, which: int, ask: Ask, new_tokens: int, mode: GenerationMode = PREFIX, **options: Any
    ) -> GenerationResult | None:
        opened = self._pick(which)
        engine = opened.engine
        prompt, ids = self._prompt(engine, ask)
        stock = self._stock(engine, ids, new_tokens, **options)
        result = self._ask(
            lambda: engine.generate(prompt, new_tokens, mode=mode, **options), stock, may_refuse=bool(options)
        )
        if result is not None and not _is_approximate(result):
            self._check(opened, ids, result, stock, new_tokens, **options)
        if result is not None:
            self._remember(ask, prompt, ids, result)
        return result

    @needs("generate")
    @step(which=WHICH, ask=asks(), new_tokens=NEW_TOKENS)
    def generate(self, which: int, ask: Ask, new_tokens: int) -> None:
        self._generate(which, ask, new_tokens)

    @needs("generate")
    @step(which=WHICH, ask=asks(("ids", "more")), new_tokens=NEW_TOKENS)
    def generate_again(self, which: int, ask: Ask, new_tokens: int) -> None:
        """The same prompt twice, and then the whole of it with its answer and a little more."""
        if (result := self._generate(which, ask, new_tokens)) is not None:
            self._generate(which, ask, new_tokens)
            if result.token_ids:
                self._generate(which, Ask("more", len(self.history) - 1, 1, ask.tail), new_tokens)

    @needs("chat")
    @step(which=WHICH, base=st.integers(0, 2), words=st.lists(st.integers(0, 4), min_size=1, max_size=3))
    def chat(self, which: int, base: int, words: list[int]) -> None:
        for word in words:
            self._generate(which, Ask("chat", base, 1, word), 5)

    @needs("options")
    @step(which=WHICH, ask=asks(), new_tokens=NEW_TOKENS, options=st.sampled_from(OPTIONS))
    def generate_with_options(self, which: int, ask: Ask, new_tokens: int, options: dict[str, Any]) -> None:
        self._generate(which, ask, new_tokens, **options)

    @needs("baseline")
    @step(which=WHICH, ask=asks(), new_tokens=NEW_TOKENS)
    def baseline(self, which: int, ask: Ask, new_tokens: int) -> None:
        result = self._generate(which, ask, new_tokens, mode=GenerationMode.BASELINE)
        assert result is None or result.cached_tokens == 0

    @needs("approximate")
    @step(which=WHICH, ask=asks(), new_tokens=NEW_TOKENS)
    def approximate(self, which: int, ask: Ask, new_tokens: int) -> None:
        self._generate(which, ask, new_tokens, mode=GenerationMode.CHUNK_KV_REUSE)

    @needs("ambient")
    @step(which=WHICH, ask=asks(), new_tokens=NEW_TOKENS, around=AROUND)
    def generate_within(self, which: int, ask: Ask, new_tokens: int, around: str) -> None:
        with ambient(around):
            self._generate(which, ask, new_tokens)

    @needs("sample")
    @step(which=WHICH, ask=asks(), new_tokens=NEW_TOKENS, seed=st.integers(0, 5))
    def sample(self, which: int, ask: Ask, new_tokens: int, seed: int) -> None:
        opened = self._pick(which)
        prompt, ids = self._prompt(opened.engine, ask)
        stock = self._stock(opened.engine, ids, new_tokens)
        options = {"mode": PREFIX, "do_sample": True, "seed": seed, "temperature": 0.7}
        first = self._ask(lambda: opened.engine.generate(prompt, new_tokens, **options), stock)
        second = self._ask(lambda: opened.engine.generate(prompt, new_tokens, **options), stock)
        if first is not None and second is not None and not self._is_open_question:
            assert first.token_ids == second.token_ids or reference.is_coarse(opened.engine.model)

    @needs("generate")
    @step(
        which=WHICH,
        ask=asks(),
        new_tokens=st.integers(2, 6),
        at=st.integers(0, 4),
        alter=balanced(*WITHIN),
        streamed=st.booleans(),
        back=st.booleans(),
    )
    def generate_while_changing(
        self, which: int, ask: Ask, new_tokens: int, at: int, alter: Alter, streamed: bool, back: bool
    ) -> None:
        """The model changes between two tokens; what is computed of both must not be found later."""
        if alter.group not in self.groups or (alter.group == "adapters" and self.subject.adapted is None):
            return
        self._tell_before(alter)
        engine = self._pick(which).engine
        prompt, ids = self._prompt(engine, ask)
        stock = self._stock(engine, ids, new_tokens)
        processors = LogitsProcessorList([AtToken(at, lambda: self._apply(alter))])
        options = {"mode": PREFIX, "logits_processor": processors}
        with contextlib.suppress(InvalidRequestError):
            try:
                if streamed:
                    _ = engine.stream(prompt, new_tokens, **options).result
                else:
                    engine.generate(prompt, new_tokens, **options)
            except Exception:  # what the model itself cannot answer either
                if stock is not None and stock.error is None:
                    raise
        self.tally.only_later += 1
        self._generate_later(which, ask, new_tokens, alter if back else None)

    def _generate_later(self, which: int, ask: Ask, new_tokens: int, *undone: Alter | None) -> None:
        """What was stored is found by the next one, or by one who comes when the change was taken back."""
        self._generate(which, ask, new_tokens)
        changes = [alter for alter in undone if alter is not None]
        for alter in reversed(changes):
            self._apply(_inverse(alter))
        if changes and self.unnoticed:
            self._tell(wait=False)
        if changes:
            self._generate(which, ask, new_tokens)

    # --- streams -----------------------------------------------------------------------------

    @needs("stream")
    @step(which=WHICH, ask=asks(), new_tokens=NEW_TOKENS, pieces=st.integers(0, 3))
    def stream(self, which: int, ask: Ask, new_tokens: int, pieces: int) -> None:
        """Read to the end (0), or closed after some pieces."""
        opened = self._pick(which)
        prompt, ids = self._prompt(opened.engine, ask)
        stock = self._stock(opened.engine, ids, new_tokens)
        beams = "num_beams" in self.subject.fields
        if pieces:
            self._ask(
                lambda: self._cut_stream(opened.engine, prompt, new_tokens, pieces), stock, may_refuse=beams
            )
            return
        result = self._ask(
            lambda: self._whole_stream(opened.engine, prompt, new_tokens), stock, may_refuse=beams
        )
        if result is not None:
            self._check(opened, ids, result, stock, new_tokens)
            self._remember(ask, prompt, ids, result)

    @staticmethod
    def _whole_stream(engine: KVBoost, prompt: Any, new_tokens: int) -> GenerationResult:
        with engine.stream(prompt, new_tokens, mode=PREFIX) as stream:
            text = "".join(stream)
            assert text == stream.result.output_text
            return stream.result

    @staticmethod
    def _cut_stream(engine: KVBoost, prompt: Any, new_tokens: int, pieces: int) -> None:
        with engine.stream(prompt, new_tokens, mode=PREFIX) as stream:
            for _ in range(pieces):
                next(stream, None)

    @needs("stream")
    @step(which=WHICH, ask=asks(), alter=balanced(*WITHIN), back=st.booleans())
    def stream_while_changing(self, which: int, ask: Ask, alter: Alter, back: bool) -> None:
        """The change comes at any moment of the stream's thread."""
        if alter.group not in self.groups or (alter.group == "adapters" and self.subject.adapted is None):
            return
        self._tell_before(alter)
        opened = self._pick(which)
        prompt, ids = self._prompt(opened.engine, ask)
        stock = self._stock(opened.engine, ids, 6)
        with contextlib.suppress(InvalidRequestError):
            stream = opened.engine.stream(prompt, 6, mode=PREFIX)
            try:
                self._apply(alter)
                _ = stream.result
            except Exception:  # what the model itself cannot answer either
                if stock is not None and stock.error is None:
                    raise
        self.tally.only_later += 1
        self._generate_later(which, ask, 3, alter if back else None)

    # --- many --------------------------------------------------------------------------------

    @needs("batch")
    @step(
        which=WHICH,
        several=st.lists(asks(), min_size=2, max_size=4),
        new_tokens=NEW_TOKENS,
        many=st.booleans(),
    )
    def batch(self, which: int, several: list[Ask], new_tokens: int, many: bool) -> None:
        opened = self._pick(which)
        engine = opened.engine
        asked = [self._prompt(engine, ask) for ask in several]
        stocks = [self._stock(engine, ids, new_tokens) for _, ids in asked]
        call = engine.generate_many if many or engine.bit_exact else engine.generate_batch
        results = self._ask(lambda: call([prompt for prompt, _ in asked], new_tokens), *stocks)
        for ask, (prompt, ids), stock, result in zip(several, asked, stocks, results or (), strict=False):
            self._check(opened, ids, result, stock, new_tokens)
            self._remember(ask, prompt, ids, result)

    @needs("batch")
    @step(
        which=WHICH,
        several=st.lists(asks(), min_size=2, max_size=5),
        new_tokens=NEW_TOKENS,
        after=st.integers(1, 3),
        alter=balanced(*BETWEEN),
        back=st.booleans(),
    )
    def stream_many(
        self, which: int, several: list[Ask], new_tokens: int, after: int, alter: Alter, back: bool
    ) -> None:
        """The model changes after some results: each is the model's as it was, or as it is."""
        opened = self._pick(which)
        engine = opened.engine
        asked = [self._prompt(engine, ask) for ask in several]
        stocks = [self._stock(engine, ids, new_tokens) for _, ids in asked]
        with contextlib.ExitStack() as outcomes:
            try:
                stream = engine.stream_many([prompt for prompt, _ in asked], new_tokens)
                outcomes.callback(stream.close)
                for count, (index, result) in enumerate(stream, start=1):
                    now = self._stock(engine, asked[index][1], new_tokens)
                    self._check_either(opened, asked[index][1], result, stocks[index], now, new_tokens)
                    if count == after:
                        self._apply(alter)
            except PartialResultsError:
                if all(stock is not None and stock.error is None for stock in stocks) and not self.unnoticed:
                    raise
        self._generate_later(which, several[-1], new_tokens, alter if back else None)

    def _check_either(
        self,
        opened: Opened,
        ids: list[int],
        result: GenerationResult,
        before: Stock | None,
        now: Stock | None,
        new_tokens: int,
    ) -> None:
        """An answer of the model as it was, or as it is now."""
        if before is not None and before.error is None and result.token_ids == before.token_ids:
            self.tally.checks += 1
            self.tally.hits += result.cached_tokens > 0
        else:
            self._check_answer(opened, ids, result, now if before is not None else None, new_tokens)

    @needs("score")
    @step(
        which=WHICH,
        several=st.lists(asks(), min_size=1, max_size=3),
        lengths=st.lists(st.integers(1, 5), min_size=3, max_size=3),
    )
    def score(self, which: int, several: list[Ask], lengths: list[int]) -> None:
        opened = self._pick(which)
        engine = opened.engine
        asked = [self._prompt(engine, ask) for ask in several]
        continuations = [random_ids(length, 90 + length) for length in lengths[: len(asked)]]
        with self._unharmed():
            results = engine.score([ids for _, ids in asked], continuations)
        for (_, ids), continuation, result in zip(asked, continuations, results, strict=True):
            self._check_plain(opened, result)
            if self._is_open_question:
                self.tally.only_later += 1
                continue
            wanted = reference.log_likelihoods(engine.model, ids, continuation)
            self.tally.checks += 1
            self.tally.hits += result.cached_tokens > 0
            bound = 1.0 if reference.is_coarse(engine.model) else reference.SCORE_TOLERANCE
            gap = max(abs(a - b) for a, b in zip(wanted, result.token_log_likelihoods, strict=True))
            assert gap <= bound, f"a score is off by {gap:.3g} ({_origins(result)})"

    # --- one's own generate --------------------------------------------------------------------

    @needs("prepare")
    @step(
        which=WHICH,
        ask=asks(),
        new_tokens=NEW_TOKENS,
        before=st.none() | balanced(*BETWEEN),
        after=st.none() | balanced(*BETWEEN),
        back=st.booleans(),
    )
    def prepare_and_commit(
        self, which: int, ask: Ask, new_tokens: int, before: Alter | None, after: Alter | None, back: bool
    ) -> None:
        """The model may change before or after one's own generate, and the commit comes then."""
        opened = self._pick(which)
        engine = opened.engine
        prompt, ids = self._prompt(engine, ask)
        stock = self._stock(engine, ids, new_tokens)
        prepared = self._ask(lambda: engine.prepare(prompt, new_tokens), stock)
        if prepared is None:
            return
        changed = before is not None and self._apply(before)
        try:
            output = engine.model.generate(**prepared, max_new_tokens=new_tokens, do_sample=False)
        except Exception:  # with settings of one's own that take no cache
            if stock is not None and stock.error is None and not self.subject.fields and not changed:
                raise
            return
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        if after is not None:
            changed = self._apply(after) or changed
        with self._unharmed():
            engine.commit(prepared, sequences)
        given = sequences[0, len(ids) :].tolist()
        if stock is None or changed or stock.error is not None or self.subject.fields:
            self.tally.only_later += 1
        elif given != stock.token_ids:
            self.tally.near_ties += 1
            assert reference.is_near_tie(engine.model, ids, stock.token_ids, given, new_tokens), (
                f"prepared: {given}, the model itself: {stock.token_ids}"
            )
        if len(ids) < 150:
            self.history = [*self.history[-2:], ids + given]
        undone = (before, after) if back else ()
        self._generate_later(which, Ask("more", len(self.history) - 1, 1, 3), new_tokens, *undone)

    # --- the running batch ---------------------------------------------------------------------

    @needs("scheduler")
    @step(
        which=WHICH,
        several=st.lists(asks(), min_size=1, max_size=2),
        new_tokens=st.integers(1, 6),
        repaired=st.integers(0, 2),
    )
    def join(self, which: int, several: list[Ask], new_tokens: int, repaired: int = 0) -> None:
        """The first `repaired` of them may reuse moved text; the others must not notice."""
        for number, ask in enumerate(several):
            mode = GenerationMode.CHUNK_KV_REUSE if number < repaired else PREFIX
            self._join(self._pick(which), ask, new_tokens, mode)

    def _join(self, opened: Opened, ask: Ask, new_tokens: int, mode: GenerationMode = PREFIX) -> None:
        engine = opened.engine
        prompt, ids = self._prompt(engine, ask)
        stock = self._stock(engine, ids, new_tokens)
        request = self._ask(lambda: read_request(engine, prompt, new_tokens, mode), stock)
        if request is None:
            return
        if engine.core.parts.why_alone(request):
            result = self._ask(lambda: engine.core.alone.serve(request), stock)
            if result is not None and not _is_approximate(result):
                self._check(opened, ids, result, stock, new_tokens)
            return
        if opened.scheduler is None:
            opened.scheduler = engine.core.scheduler(max_sequences=3, max_tokens=600)
        if not opened.scheduler.has_room(request):
            return
        joined = Joined(ids, is_simple=not self.subject.fields and mode is PREFIX)
        opened.joined.append(joined)
        with self._unharmed():
            opened.scheduler.join(request, joined)

    @needs("scheduler")
    @step(which=WHICH, steps=st.integers(1, 8))
    def advance(self, which: int, steps: int) -> None:
        opened = self._pick(which)
        for _ in range(steps if opened.scheduler is not None else 0):
            with self._unharmed():
                opened.scheduler.step()
            self._check_joined(opened)

    @needs("scheduler")
    @step(which=WHICH, index=st.integers(0, 2))
    def leave(self, which: int, index: int) -> None:
        opened = self._pick(which)
        if opened.scheduler is not None and index < len(opened.scheduler.sequences):
            with self._unharmed():
                opened.scheduler.leave(opened.scheduler.sequences[index])
            self._check_joined(opened)

    @needs("scheduler")
    @precondition(lambda _: not is_autocast())
    @step(
        which=WHICH,
        several=st.lists(asks(), min_size=1, max_size=4),
        new_tokens=NEW_TOKENS,
        repaired=st.integers(0, 2),
    )
    def serve(self, which: int, several: list[Ask], new_tokens: int, repaired: int) -> None:
        """All at once through a server's worker; the first `repaired` of them may reuse moved text."""
        if is_autocast():
            return
        opened = self._pick(which)
        engine = opened.engine
        asked = [self._prompt(engine, ask) for ask in several]
        stocks = [self._stock(engine, ids, new_tokens) for _, ids in asked]
        modes = [
            GenerationMode.CHUNK_KV_REUSE if number < repaired else PREFIX for number in range(len(asked))
        ]
        for_all = list(zip(asked, modes, strict=True))
        results = self._ask(
            lambda: served(
                engine, [read_request(engine, each[0], new_tokens, mode) for each, mode in for_all]
            ),
            *stocks,
        )
        for (_, ids), mode, stock, result in zip(asked, modes, stocks, results or (), strict=False):
            if mode is PREFIX:
                assert not _is_approximate(result), f"an exact request was repaired ({_origins(result)})"
            if not _is_approximate(result):
                self._check(opened, ids, result, stock, new_tokens)

    def _check_joined(self, opened: Opened) -> None:
        """Each token that came is the next one of the model as it is now, behind what was given so far."""
        for joined in opened.joined:
            assert joined.error is None, f"a request in the running batch failed: {joined.error!r}"
            while joined.checked < len(joined.tokens):
                context = joined.ids + joined.tokens[: joined.checked]
                self._check_token(opened, joined, context, joined.tokens[joined.checked])
                joined.checked += 1
            if joined.result is not None:
                assert joined.result.token_ids == joined.tokens
        opened.joined = [joined for joined in opened.joined if joined.result is None]

    def _check_token(self, opened: Opened, joined: Joined, context: list[int], given: int) -> None:
        if self._is_open_question or not joined.is_simple:
            self.tally.only_later += 1
            return
        self.tally.checks += 1
        logits = reference.next_logits(opened.engine.model, context)
        wanted = int(logits.argmax())
        if wanted != given:
            assert reference.is_close(opened.engine.model, logits, wanted, given), (
                f"the running batch said {given} behind {len(context)} tokens, the model itself {wanted}"
            )
            self.tally.near_ties += 1

    # --- the cache -----------------------------------------------------------------------------

    @needs("warm")
    @step(which=WHICH, ask=asks())
    def warm(self, which: int, ask: Ask) -> None:
        engine = self._pick(which).engine
        prompt, _ = self._prompt(engine, ask)
        with self._unharmed():
            engine.warm(prompt)

    @needs("pins")
    @step(which=WHICH, ask=asks(("ids", "more")), pinned=st.booleans())
    def pin(self, which: int, ask: Ask, pinned: bool) -> None:
        engine = self._pick(which).engine
        prompt, _ = self._prompt(engine, ask)
        with self._unharmed():
            (engine.pin if pinned else engine.unpin)(prompt)

    @needs("explain")
    @step(which=WHICH, ask=asks())
    def explain(self, which: int, ask: Ask) -> None:
        engine = self._pick(which).engine
        prompt, _ = self._prompt(engine, ask)
        engine.explain(
            prompt, 4, mode=PREFIX
        )  # what a change made worthless is dropped by the first to see it
        before = engine.cache_manager.stats()
        with self._unharmed():
            engine.explain(prompt, 4, mode=PREFIX)
        is_busy = self.unnoticed or "disk_cache_dir" in self._pick(which).options
        assert is_busy or engine.cache_manager.stats() == before

    @needs("clear")
    @step(which=WHICH)
    def clear(self, which: int) -> None:
        with self._unharmed():
            self._pick(which).engine.clear()

    @needs("save")
    @step(which=WHICH)
    def save(self, which: int) -> None:
        with self._unharmed():
            self._pick(which).engine.save(self.folder / "saved", progress=False)

    @needs("save")
    @precondition(lambda self: (self.folder / "saved").exists())
    @step(which=WHICH)
    def load(self, which: int) -> None:
        """What was saved comes back, or is refused: the model may be another one by now."""
        if not (self.folder / "saved").exists():
            return
        with self._unharmed(), contextlib.suppress(CacheFileError):
            self._pick(which).engine.load(self.folder / "saved", progress=False)

    # --- at once -------------------------------------------------------------------------------

    @needs("concurrent")
    @precondition(lambda _: not is_autocast())
    @step(
        which=st.lists(WHICH, min_size=2, max_size=2),
        several=st.lists(asks(("ids", "more", "text")), min_size=2, max_size=2),
        new_tokens=NEW_TOKENS,
        with_sibling=st.booleans(),
    )
    def concurrent(self, which: list[int], several: list[Ask], new_tokens: int, with_sibling: bool) -> None:
        """Two threads at once, on one model or on two that share their config."""
        if is_autocast():
            return
        pairs = [self._pick(each) for each in which]
        if with_sibling and not self.subject.is_foreign:
            pairs[1] = self._with_sibling()
        asked = [self._prompt(opened.engine, ask) for opened, ask in zip(pairs, several, strict=True)]
        stocks = [
            self._stock(opened.engine, ids, new_tokens) for opened, (_, ids) in zip(pairs, asked, strict=True)
        ]
        results: list[Any] = [None, None]

        def answer(number: int) -> None:
            try:
                results[number] = pairs[number].engine.generate(asked[number][0], new_tokens, mode=PREFIX)
            except Exception as error:
                results[number] = error

        def both() -> None:
            threads = [threading.Thread(target=answer, args=(number,)) for number in (0, 1)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        self._ask(both, *stocks)
        for opened, (_, ids), stock, result in zip(pairs, asked, stocks, results, strict=True):
            if isinstance(result, Exception):
                assert stock is None or stock.error is not None, f"in a thread: {result!r}"
            else:
                self._check(opened, ids, result, stock, new_tokens)

    def _with_sibling(self) -> Opened:
        """An engine on another model that has the very config object of this one."""
        if self.sibling is None:
            other = build(self.subject.kind, seed=5)
            other.config = self.subject.inner.config
            for module in other.modules():
                if hasattr(module, "config"):
                    module.config = self.subject.inner.config
            self.sibling = KVBoost(other, self.tokenizer, chunk_size=16, max_chunks=None)
        return Opened(self.sibling, {}, self.subject.dtype)

    # --- changes of the model ------------------------------------------------------------------

    def _apply(self, alter: Alter) -> bool:
        """Change the model; True where that was done."""
        if alter.group not in self.groups:
            return False
        self._tell_before(alter)
        self.tally.changes += 1
        self.unnoticed |= self.subject.change(alter.group, alter.way, alter.target, alter.factor)
        return True

    def _tell_before(self, alter: Alter) -> None:
        """A write that nobody has noticed yet is told before the next one: that may take it back unseen."""
        if self.unnoticed and alter.group in ("weights", "partial", "adapters", "dtype"):
            self._tell(wait=False)

    def _change(self, alter: Alter) -> None:
        self._apply(alter)

    @needs("weights")
    @step(alter=alters("weights"))
    def change_weights(self, alter: Alter) -> None:
        self._change(alter)

    @needs("partial")
    @step(alter=alters("partial"), told=st.booleans())
    def change_partly(self, alter: Alter, told: bool) -> None:
        self._change(alter)
        if told:
            self._tell(wait=False)

    @precondition(lambda self: self.unnoticed)
    @step(wait=st.booleans())
    def tell(self, wait: bool) -> None:
        self._tell(wait=wait)

    def _tell(self, *, wait: bool) -> None:
        """Say that weights have changed, or let the stated time pass."""
        if wait and all("weights_check_seconds" in opened.options for opened in self.engines):
            time.sleep(CHECK_SECONDS * 1.5)
        else:
            for opened in self.engines:
                getattr(opened.engine, "weights_changed", lambda: None)()
        self.unnoticed = False

    @needs("adapters")
    @step(alter=alters("adapters"))
    def change_adapters(self, alter: Alter) -> None:
        self._change(alter)

    @needs("buffers")
    @step(alter=alters("buffers"))
    def change_buffers(self, alter: Alter) -> None:
        self._change(alter)

    @needs("hooks")
    @step(alter=alters("hooks"))
    def change_hooks(self, alter: Alter) -> None:
        self._change(alter)

    @needs("forwards")
    @step(alter=alters("forwards"))
    def change_forwards(self, alter: Alter) -> None:
        self._change(alter)

    @needs("flags")
    @step(alter=alters("flags", "checkpointing"))
    def change_flags(self, alter: Alter) -> None:
        self._change(alter)

    @needs("config")
    @step(alter=alters("config"))
    def change_config(self, alter: Alter) -> None:
        self._change(alter)

    @step(alter=balanced("autocast", "dtype", "attention", "threads"))
    def change_the_rest(self, alter: Alter) -> None:
        self._change(alter)

    @step()
    def settle(self) -> None:
        """Take back what keeps KV from being reused."""
        self.subject.settle()

    def teardown(self) -> None:
        self.tally.note_failure(sys.exc_info()[1], self.steps)
        for opened in self.engines:
            opened.engine.close()
        if self.sibling is not None:
            self.sibling.close()
        if hasattr(self, "subject"):
            self.subject.close()
        torch.set_num_threads(self._threads)
        self._always.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


def _inverse(alter: Alter) -> Alter:
    """What takes a change back, or nearly: weights are again as at first."""
    ways = {
        "disable": "enable",
        "merge": "unmerge",
        "unmerge": "merge",
        "enable": "disable",
        "eager": "sdpa",
        "sdpa": "eager",
        "bfloat16": "float32",
        "float64": "float32",
    }
    way = ways.get(alter.way, alter.way)
    if alter.group in ("hooks", "flags"):
        way = "none" if alter.group == "hooks" else "eval"
    return Alter(alter.group, way, alter.target, 1.0)


def _is_approximate(result: GenerationResult) -> bool:
    return any(span.origin in (Origin.APPROXIMATE, Origin.RECOMPUTED) for span in result.spans)


def _origins(result: Any) -> str:
    return ", ".join(
        f"{span.start}-{span.end} {span.origin.value} {span.reason}".strip() for span in result.spans
    )
