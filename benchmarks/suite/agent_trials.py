"""What full prefill makes of an agent's prompt, and what an engine's store makes of it.

Both give an answer and the probabilities of the next tokens. Neither stores anything, so that many questions
can be asked of a cache as it is. Knows a model and an engine, no chats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from kvboost.choices import AssemblyMode
from kvboost.kv import rope
from kvboost.kv.arena import Arena
from kvboost.proof.measures import divergence
from kvboost.reuse import repair, strategies
from kvboost.reuse.assembler import Lookup
from kvboost.run import decode

Forward = Callable[[list[int]], torch.Tensor]  # ids behind what was read before to logits [tokens, vocab]


@dataclass(frozen=True)
class Reading:
    """A greedy answer, and the logits `[answer, vocab]` that it was chosen from."""

    answer_ids: list[int]
    logits: torch.Tensor


class FullPrefill:
    """The stock model, its cache and its attention.

    Text that a prompt has in common with the one before, from its start on, is not read twice: what stands
    behind it cannot change its KV.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.clear()

    def clear(self) -> None:
        """Forget all text."""
        self._ids = np.zeros(0, dtype=np.int64)
        self._cache = DynamicCache(config=self._model.config.get_text_config(decoder=True))

    def read(self, token_ids: np.ndarray, answer_tokens: int) -> Reading:
        """Read a prompt `[tokens]` and answer it."""
        kept = _common(self._ids, token_ids[:-1])
        if kept == 0:
            self.clear()
        elif kept < len(self._ids):
            self._cache.crop(kept - len(self._ids))  # drops that many
        with decode.running(self._model, fast=False), torch.no_grad():
            rope.reset_dynamic_frequencies(self._model)
            last = self._forward(token_ids[kept:].tolist())[-1]
            reading = _decode(last, self._forward, answer_tokens)
        self._ids = np.concatenate([token_ids, np.asarray(reading.answer_ids[:-1], dtype=np.int64)])
        return reading

    def _forward(self, ids: list[int]) -> torch.Tensor:
        return _logits(self._model, ids, self._cache, kept=1)


@dataclass(frozen=True)
class Reused:
    """What reuse made of a prompt: its own answer, and its divergence from full prefill in nats."""

    answer_ids: list[int]
    kl: float


def reuse(engine: Any, token_ids: np.ndarray, full: Reading) -> Reused:
    """Answer a prompt `[tokens]` over what the store of `engine` has of it, repaired as the engine would.

    The divergence is that of the tokens of the answer of full prefill.
    """
    total, size = len(token_ids), len(full.answer_ids)
    settings = engine.settings
    strategy = strategies.for_moved_text(settings, settings.recompute_ratio)
    arena = Arena(engine.layout, total + size)
    lookup = Lookup(token_ids, engine.namespace(), total - 1, AssemblyMode.CHUNK_REUSE)

    def forward(ids: list[int]) -> torch.Tensor:
        return _logits(engine.model, ids, arena)

    with decode.running(engine.model, fast=True), torch.no_grad():
        with engine.assembler.planned(lookup) as plan:
            engine.assembler.place(plan, arena)
        repair.complete(engine.model, token_ids, arena, plan.repair_runs, strategy, end=total - 1)
        along = forward([int(token_ids[-1]), *full.answer_ids[:-1]])
        arena.set_length(total)
        own = _decode(along[0], forward, size)
    return Reused(own.answer_ids, divergence(full.logits, along))


def _decode(logits: torch.Tensor, forward: Forward, tokens: int) -> Reading:
    """A greedy answer of `tokens` tokens that begins with what `logits` `[vocab]` say."""
    rows = [logits]
    while len(rows) < tokens:
        rows.append(forward([int(rows[-1].argmax())])[-1])
    return Reading([int(row.argmax()) for row in rows], torch.stack(rows))


def _logits(model: Any, ids: list[int], cache: Any, kept: int = 0) -> torch.Tensor:
    """Logits `[tokens, vocab]` of `ids` behind what `cache` holds: all, or those of the last `kept`."""
    fed = torch.tensor([ids], device=model.get_input_embeddings().weight.device)
    out = model(fed, past_key_values=cache, use_cache=True, logits_to_keep=kept)
    logits: torch.Tensor = out.logits[0].float()
    return logits


def _common(left: np.ndarray, right: np.ndarray) -> int:
    """How many tokens both begin with."""
    size = min(len(left), len(right))
    different = np.flatnonzero(left[:size] != right[:size])
    return int(different[0]) if len(different) else size
