"""How far an answer on reused KV is from one on a full prefill: the error of approximate reuse.

A trial reads a prompt once with the stock model and keeps the probabilities of its greedy continuation;
then it fills a cache from the engine's store in one of several ways and compares. Stores nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from transformers import DynamicCache

from kvboost.choices import AssemblyMode
from kvboost.kv import rope
from kvboost.kv.arena import Arena
from kvboost.proof.fresh_engine import ReusesText
from kvboost.reuse import repair, strategies
from kvboost.reuse.assembler import Lookup
from kvboost.reuse.plan import ReusePlan
from kvboost.reuse.repair import RepairStrategy, positions_of
from kvboost.run import decode
from kvboost.settings import EngineSettings

METHODS = tuple(strategies.STRATEGIES)


@dataclass(frozen=True)
class Measured:
    """One way of reusing, against full prefill."""

    kl: float  # mean divergence over the continuation, in nats
    top1: float  # share of its positions whose most likely token agrees
    reused_tokens: int  # found in the cache, and not exact
    recomputed_tokens: int
    seconds: float  # look-up, placing, choosing and computing, to all but the last token
    answer_ids: tuple[int, ...] = ()  # what greedy decoding writes then, as far as it was asked for


def strategy_of(method: str, ratio: float) -> RepairStrategy:
    """The repair strategy that `method` names, with the defaults of the engine's options."""
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}; got {method!r}")
    return strategies.STRATEGIES[method](EngineSettings(), ratio)


def takes_ratio(method: str) -> bool:
    """Whether the recompute ratio makes a difference to the strategy that `method` names."""
    return strategy_of(method, 0.1) != strategy_of(method, 0.2)


def until_end(token_ids: list[int], end_ids: set[int]) -> list[int]:
    """The ids before the first end token: a trial goes on behind it, an answer does not."""
    end = next((number for number, token in enumerate(token_ids) if token in end_ids), len(token_ids))
    return token_ids[:end]


class ReuseTrial:
    """A prompt's reference, and what each way of reusing makes of it."""

    def __init__(self, engine: ReusesText, prompt_ids: np.ndarray, continuation_tokens: int = 32) -> None:
        """Read `prompt_ids` `[tokens]` with the stock model and continue greedily."""
        self._engine = engine
        self._ids = np.asarray(prompt_ids, dtype=np.int64)
        model = engine.model
        device = model.get_input_embeddings().weight.device
        ids = torch.from_numpy(self._ids).to(device).unsqueeze(0)
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        with decode.running(model, fast=False), torch.no_grad():
            rope.reset_dynamic_frequencies(model)
            started = time.perf_counter()
            logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
            self.baseline_seconds = time.perf_counter() - started
            rows = [logits.float()]
            for _ in range(continuation_tokens - 1):
                token = rows[-1].argmax().reshape(1, 1)
                rows.append(model(token, past_key_values=cache, use_cache=True).logits[0, -1].float())
        self.answer_ids: list[int] = [int(row.argmax()) for row in rows]
        ends = getattr(model.generation_config, "eos_token_id", None)
        self.end_ids: set[int] = set(ends if isinstance(ends, list) else [ends]) - {None}
        self._reference = torch.log_softmax(torch.stack(rows), dim=-1)  # [continuation, vocab]

    def measure(
        self, method: str, ratio: float, engine: ReusesText | None = None, *, answer_tokens: int = 0
    ) -> Measured:
        """Fill a cache from the engine's store as `method` says and compare the continuation.

        Another `engine` of the same model may be given. With `answer_tokens`, so many are written greedily.
        """
        return self.measure_strategy(strategy_of(method, ratio), engine, answer_tokens=answer_tokens)

    def measure_strategy(
        self, strategy: RepairStrategy, engine: ReusesText | None = None, *, answer_tokens: int = 0
    ) -> Measured:
        """Like `measure`, with a strategy of one's own."""
        engine = engine or self._engine
        started = time.perf_counter()
        with decode.running(engine.model, fast=True):
            arena, plan, recomputed = self._filled(strategy, engine)
            seconds = time.perf_counter() - started
            log_probs = self._continuation(arena)
            answer = self._answer(arena, log_probs.argmax(-1).tolist(), answer_tokens)
        kl = (self._reference.exp() * (self._reference - log_probs)).sum(-1)
        agreed = self._reference.argmax(-1) == log_probs.argmax(-1)
        return Measured(
            kl=float(kl.mean().clamp_min(0)),
            top1=float(agreed.float().mean()),
            reused_tokens=len(positions_of(plan.runs, exact=False)),
            recomputed_tokens=len(recomputed),
            seconds=seconds,
            answer_ids=tuple(answer),
        )

    def _answer(self, arena: Arena, likeliest: list[int], tokens: int) -> list[int]:
        """The greedy answer of `tokens` tokens over an arena with the prompt and the reference behind it.

        `likeliest` are the likeliest tokens along that. As far as they agree with it they are the answer;
        from the first that does not, it is decoded.
        """
        if not tokens:
            return []
        pairs = zip(likeliest, self.answer_ids, strict=True)
        agreed = next((number for number, (a, b) in enumerate(pairs) if a != b), len(likeliest))
        answer = until_end(likeliest[: min(tokens, agreed + 1)], self.end_ids)
        if len(answer) <= min(tokens - 1, agreed):  # it has ended
            return answer
        model, device = self._engine.model, self._engine.model.get_input_embeddings().weight.device
        arena.set_length(len(self._ids) + min(agreed, len(likeliest) - 1))
        with torch.no_grad():
            while len(answer) < tokens:
                fed = torch.tensor([answer[-1:]], device=device)
                answer.append(int(model(fed, past_key_values=arena, use_cache=True).logits[0, -1].argmax()))
                if answer[-1] in self.end_ids:
                    break
        return until_end(answer, self.end_ids)

    def _filled(self, strategy: RepairStrategy, engine: ReusesText) -> tuple[Arena, ReusePlan, np.ndarray]:
        """An arena with all but the prompt's last token, and what was reused and computed again for it."""
        total = len(self._ids)
        arena = Arena(engine.layout, total + len(self.answer_ids))
        lookup = Lookup(self._ids, engine.namespace(), total - 1, AssemblyMode.CHUNK_REUSE)
        with engine.assembler.planned(lookup) as plan:
            engine.assembler.place(plan, arena)
        runs = plan.repair_runs
        recomputed = repair.complete(engine.model, self._ids, arena, runs, strategy, end=total - 1)
        return arena, plan, recomputed

    def _continuation(self, arena: Arena) -> torch.Tensor:
        """Log-probabilities `[continuation, vocab]` along the reference's own continuation."""
        fed = np.concatenate([self._ids[-1:], np.asarray(self.answer_ids[:-1], dtype=np.int64)])
        device = self._engine.model.get_input_embeddings().weight.device
        with torch.no_grad():
            logits = self._engine.model(
                torch.from_numpy(fed).to(device).unsqueeze(0), past_key_values=arena, use_cache=True
            ).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)
