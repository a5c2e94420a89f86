"""For callers with their own `model.generate`: `prepare` gives it a filled cache, `commit` stores the result.

Knows the parts of an engine, and nothing of what runs between the two calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from kvboost.choices import GenerationMode
from kvboost.executor.warming import Warmer
from kvboost.kv.arena import Arena
from kvboost.parts.engine_parts import EngineParts
from kvboost.requests.prepared import PreparedPrompt
from kvboost.requests.prompts import Prompt
from kvboost.requests.request import Request
from kvboost.reuse.assembler import Lookup
from kvboost.reuse.recorder import Answer
from kvboost.run import decode
from kvboost.run.options import read_options
from kvboost.store.inserter import StoreReport


class OwnLoop:
    """`prepare` and `commit` of one engine."""

    def __init__(
        self, parts: EngineParts, warmer: Warmer, tell: Callable[[Sequence[PreparedPrompt]], None]
    ) -> None:
        """`tell` hears what was reused for a prompt, after its answer was stored."""
        self._parts = parts
        self._warmer = warmer
        self._tell = tell

    def prepare(self, prompt: Prompt, max_new_tokens: int, cache_salt: str | None) -> PreparedPrompt:
        """Ids, mask, and a cache with what is stored of the prompt."""
        parts = self._parts
        options = read_options(parts.model, max_new_tokens, 1.0, False, None, {})
        salt = parts.salt(cache_salt)
        request = Request(
            parts.reader.read(prompt, salt),
            GenerationMode.PREFIX_CACHE,
            options,
            parts.fit.namespace(salt),
            time.perf_counter(),
        )
        ids = request.token_ids
        parts.requests.check_positions(len(ids), "the prompt", len(ids))
        if why := parts.why_plain(request) or options.why_not_prepared:
            return PreparedPrompt.gated(parts.model, ids, why)
        parts.look_ahead(request)
        arena = Arena(parts.layout, len(ids) + max_new_tokens)
        plan = parts.loader.place(Lookup(ids, request.namespace, request.limit), arena)
        parts.recorder.count(request, plan, plan.reused)
        if parts.bit_exact:
            with decode.running(parts.model, fast=False, was_read=True):
                stop = decode.last_stop(arena.length, len(ids), parts.block)
                decode.prefill(parts.model, ids, arena, stop, block=parts.block)
        prepared = PreparedPrompt(parts.model, ids, arena, plan.spans(), request.namespace)
        arena.written_by = prepared.check_with(parts.fit.is_current)
        return prepared

    def commit(self, prepared: PreparedPrompt, output_ids: torch.Tensor | Sequence[int]) -> StoreReport:
        """Store what was computed for `prepared`; `output_ids` `[tokens]` is what `generate` returned."""
        report = self._store(prepared, output_ids)
        self._tell([prepared])
        return report

    def _store(self, prepared: PreparedPrompt, output_ids: torch.Tensor | Sequence[int]) -> StoreReport:
        parts = self._parts
        ids = prepared.computed_ids(output_ids)
        if ids is None or prepared.arena is None or prepared.namespace is None:
            return StoreReport()
        if why := prepared.why_not_stored(ids):
            return parts.recorder.refuse(why)
        prompt_tokens = len(prepared.token_ids)
        answer = ids[prompt_tokens:].tolist()
        answered = Answer(prompt_tokens, answer, parts.reader.decode(answer))
        return self._warmer.store_answer(ids, prepared.arena, prepared.namespace, answered)
