"""Storing what sequences of a running batch have computed: pieces of prompts, then prompts and answers.

Knows sequences and where their KV lies; the recorder decides what may be stored.
"""

from __future__ import annotations

import numpy as np

from kvboost.batching.batch_memory import BatchMemory
from kvboost.batching.sequence import Sequence
from kvboost.identity.namespace import Namespace
from kvboost.parts.engine_parts import EngineParts
from kvboost.parts.model_fit import Reading
from kvboost.requests.prepared import LENGTH_REASON
from kvboost.reuse.recorder import Answer
from kvboost.run.packed_step import SequenceKV


class SequenceStorer:
    """Stores for one scheduler. With a `reading`, that says for all of a step whether the model has changed.

    It is used around the storing alone: whoever hears of tokens may ask the engine for something else.
    """

    def __init__(self, parts: EngineParts, memory: BatchMemory) -> None:
        self._parts = parts
        self._memory = memory
        self.reading: Reading | None = None

    def has_changed(self, namespace: Namespace) -> bool:
        """Whether the model is another one than when `namespace` was read."""
        with self._parts.fit.one_reading(self.reading):
            return self._parts.fit.namespace(namespace.salt) != namespace

    def store_piece(self, sequence: Sequence) -> None:
        """Store what is new of a sequence's prompt, piece by piece, so that no step has much to store."""
        filled = min(sequence.filled_tokens, sequence.limit, sequence.exact_tokens)
        chunk = self._parts.manager.chunk_size
        if filled - sequence.stored_tokens >= chunk:
            sequence.stored_tokens = filled
            self._store_tokens(sequence, sequence.request.token_ids[: filled - filled % chunk], is_piece=True)

    def store(self, sequence: Sequence, answer: Answer) -> None:
        """Store what a sequence has computed: prompt and answer; of one that was scored, the prompt."""
        request, lane = sequence.request, sequence.lane
        if not sequence.is_decoding:  # nothing of a repair that is not done
            filled = min(sequence.filled_tokens, sequence.exact_tokens)
            self._store_tokens(sequence, request.token_ids[:filled])
            return
        lane.before = sequence.segments
        kv = SequenceKV(self._memory.arena, lane)
        plan, recomputed, recorder = sequence.plan, sequence.recomputed, self._parts.recorder
        with self._parts.fit.one_reading(self.reading):
            if not sequence.is_sampled:
                recorder.store(request.prompt.token_ids, kv, request.namespace, plan, recomputed)
                return
            ids = answer.run_ids(request.token_ids)
            if lane.end != len(ids):
                recorder.refuse(LENGTH_REASON)
            else:
                recorder.store_answer(ids, kv, request.namespace, answer, plan, recomputed)

    def _store_tokens(self, sequence: Sequence, token_ids: np.ndarray, *, is_piece: bool = False) -> None:
        """Store the first tokens of a prompt, which are exact."""
        kv = SequenceKV(self._memory.arena, sequence.node.segment)
        of = sequence.request.namespace, sequence.plan
        with self._parts.fit.one_reading(self.reading):
            self._parts.recorder.store(token_ids, kv, *of, is_piece=is_piece)
