"""Continuous batching: requests join and leave one running batch at any step.

    join: match -> place what is stored -> a lane of its own
    step: some prompt tokens of sequences in prefill or repair, one token for each that decodes
    leave: result -> store

Prefixes that requests share lie in the arena once and are computed once (`radix_tree`): a sequence that needs
text that is being computed waits for it. A long prompt is prefilled in blocks, cut so that the other
sequences' tokens come on time. Text that has moved is placed in private nodes, and the tokens of it that are
computed again go through like those of any prompt. Where the model changes between two steps, sequences in
a server's batch go on outside the arena, on the model as it is then, and nothing of theirs is stored. One
thread drives it. Knows sequences and stores, no queue and no network.
"""

from __future__ import annotations

import time
from collections import abc
from dataclasses import dataclass

import numpy as np

from kvboost.batching.batch_memory import BatchMemory
from kvboost.batching.pace import Pace
from kvboost.batching.prefill import Turns, fills_of, speaks_first
from kvboost.batching.radix_tree import RadixTree
from kvboost.batching.repair_choice import choose_repair
from kvboost.batching.sequence import (
    Listener,
    ModelChangedError,
    Sequence,
    StockDecoder,
    TakeLogits,
    prefill_tokens,
)
from kvboost.batching.storing import SequenceStorer
from kvboost.choices import GenerationMode
from kvboost.errors import InvalidRequestError
from kvboost.identity.model_state import ModelState
from kvboost.parts.engine_parts import EngineParts
from kvboost.parts.model_fit import Reading
from kvboost.requests.prepared import CHANGED_REASON
from kvboost.requests.request import Request
from kvboost.reuse.plan import PlanPart, ReusePlan
from kvboost.reuse.recorder import Answer
from kvboost.reuse.repair import live_positions
from kvboost.run import decode
from kvboost.run.packed_step import Extension, PackedModel, Segment
from kvboost.run.sampling import SequenceSampler, choose_tokens
from kvboost.run.step_tables import Size


@dataclass
class SchedulerCounts:
    """What the scheduler has done."""

    steps: int = 0
    decoded_tokens: int = 0
    prefilled_tokens: int = 0
    joined: int = 0
    shared_tokens: int = 0  # found in the arena
    failed_steps: int = 0


class Scheduler:
    """Runs checked requests of any namespaces in one batch; each is answered as it would be alone.

    An `offline` one waits for whole answers: steps are as long as they may be, and where the model changes,
    requests fail with a ModelChangedError, unless `restarts` is unset.
    """

    def __init__(self, parts: EngineParts, memory: BatchMemory, *, offline: bool = False) -> None:
        self._parts = parts
        self.memory = memory
        self._offline = offline
        self.restarts = offline  # requests fail where the model changes, or go on outside the arena
        self.is_whole = True  # unset where a step was broken off in the middle: nothing in it is right then
        self._order: list[Sequence] = []  # by arrival; those in the arena and those outside
        self._pace = Pace(on_gpu=parts.layout.slabs[0].device.type == "cuda", offline=offline)
        self._turns = Turns()
        self.counts = SchedulerCounts()
        self.packed = PackedModel(parts.model, memory.arena, memory.spare_slot)
        self._storer = SequenceStorer(parts, memory)
        self.state: ModelState | None = None  # of the model, as it was read last for this batch

    @property
    def sequences(self) -> abc.Sequence[Sequence]:
        """Sequences in the batch, in order of arrival."""
        return tuple(self._order)

    @property
    def max_sequences(self) -> int:
        return self.memory.max_sequences

    @property
    def max_tokens(self) -> int:
        return self.memory.max_tokens

    @property
    def radix_tree(self) -> RadixTree:
        return self.memory.radix_tree

    @property
    def nbytes(self) -> int:
        """Memory of the arenas and of captured steps."""
        return self.memory.nbytes + self.packed.captured_bytes

    def capture(self, sizes: list[Size] | None = None) -> None:
        """Capture the steps that were missed, or those of `sizes`; nobody should wait for a token now."""
        captured, watch = self.packed.captured, self._parts.fit.watch
        if captured is None or self._order or not captured.missing(sizes):
            return
        with decode.running(self._parts.model, fast=True):
            state = watch.read()
            if not state.gated:
                captured.capture(state, sizes)
                if watch.read() != state:  # it changed meanwhile, and may change back
                    captured.drop()

    # --- join --------------------------------------------------------------------------------

    def needed(self, request: Request, *, answers: bool = True) -> int:
        """Room that a request takes at most, in tokens."""
        spilled = self.memory.spill_tokens(request, answers=answers)
        return prefill_tokens(request, answers=answers) + spilled

    def check(self, request: Request, *, answers: bool = True) -> None:
        """Refuse what would not fit even if nothing else ran."""
        needed = self.needed(request, answers=answers)
        if needed > self.max_tokens:
            raise InvalidRequestError(
                f"prompt and max_new_tokens need room for {needed} tokens, the running batch has "
                f"{self.max_tokens}"
            )

    def has_room(
        self,
        request: Request,
        *,
        answers: bool = True,
        spare_sequences: int = 0,
        spare_tokens: int = 0,
        in_tree: int | None = None,
    ) -> bool:
        """Whether a request could join now, and leave so many sequences and tokens free for others."""
        if len(self.memory.sequences) >= self.max_sequences - spare_sequences:
            return False
        exact = len(request.token_ids)
        if request.mode is GenerationMode.CHUNK_KV_REUSE:
            exact = self._parts.assembler.plan(self._parts.lookup(request)).first_approximate
        return self.memory.has_room(
            request, exact, answers=answers, spare_tokens=spare_tokens, in_tree=in_tree
        )

    def join(
        self,
        request: Request,
        listener: Listener,
        *,
        answers: bool = True,
        tenant: str = "",
        scores: TakeLogits | None = None,
        in_tree: int | None = None,
        state: ModelState | None = None,
    ) -> Sequence:
        """Take a request of `tenant` in; `answers=False` only computes its prompt, for later ones.

        What is stored of it is placed now, the rest is computed in the next steps. With `scores`, no tokens
        are chosen: it gets the logits. If no other can share more than the first `in_tree` tokens, the
        others go into its lane, which must have room for them and the answer. `state` is that of the model,
        if it was read just now.
        """
        self.is_whole = False
        try:
            sequence = Sequence(
                request, listener, answers=answers, tenant=tenant, scores=scores, in_tree=in_tree
            )
            return self._join(request, sequence, state)
        except Exception:  # it is refused, or a chunk was lost: what it took it has given back by now
            self.is_whole = True
            raise

    def _join(self, request: Request, sequence: Sequence, state: ModelState | None) -> Sequence:
        fit = self._parts.fit
        if state is not None:
            request.namespace = fit.as_read(state, request.namespace.salt)
        self.state = state or fit.begin([request])
        self._check_model(self.state)
        if sequence.is_sampled:
            what = request.token_ids, request.options, request.index
            sequence.sampler = SequenceSampler(self._parts.model, self._parts.tokenizer, *what)
        if why := request.namespace.gated:
            if self.restarts:
                raise ModelChangedError
            sequence.stock = StockDecoder(self._parts.model, why)
        else:
            self._enter(sequence)
        self._order.append(sequence)
        self.counts.joined += 1
        self.counts.shared_tokens += sequence.in_place
        self.is_whole = True
        return sequence

    def _enter(self, sequence: Sequence) -> None:
        """Give a sequence its slots, and place what is stored of its prompt."""
        has_entered = False

        def parts(plan: ReusePlan) -> list[PlanPart]:
            nonlocal has_entered
            if has_entered:  # a chunk could not be loaded, and this is another plan
                self.memory.cancel(sequence)
                has_entered = False
            self.memory.enter(sequence, plan.first_approximate)
            has_entered = True
            return sequence.parts_of(plan)

        lookup = self._parts.lookup(sequence.request)
        try:
            plan = self._parts.loader.place_parts(lookup, parts, self.memory.arena)
        except BaseException:
            if has_entered:
                self.memory.cancel(sequence)
            raise
        sequence.plan = plan
        sequence.stored_tokens = min(plan.prefix_end, sequence.limit)
        sequence.awaits_choice = plan.needs_repair
        if not plan.needs_repair:
            sequence.set_missing(live_positions(plan.runs, sequence.limit))

    def _check_model(self, state: ModelState) -> None:
        """Where the model, as it was just read, is not that of the last step, empty the arena."""
        sequences = list(self.memory.sequences)
        if not sequences:
            return
        namespace = sequences[0].request.namespace
        if namespace == self._parts.fit.as_read(state, namespace.salt):
            return
        for sequence in sequences:
            if self.restarts:
                self._drop(sequence)
                sequence.listener.failed(ModelChangedError())
            else:
                self.memory.free(sequence)
                sequence.stock = StockDecoder(self._parts.model, CHANGED_REASON)
        self.memory.reset()

    # --- step --------------------------------------------------------------------------------

    def step(self, state: ModelState | None = None) -> None:
        """One forward for all. Where it fails, so do all requests in it; those that join later do not.

        `state` is that of the model, if it was read just now.
        """
        self.is_whole = False
        try:
            self._step(state)
        except Exception as error:  # mostly OOM; the KV of the sequences in the step cannot be trusted
            self.fail_all(error)
        self.is_whole = True

    def _step(self, state: ModelState | None) -> None:
        if self.memory.sequences:
            self.state = state or self._parts.fit.watch.read()
            self._check_model(self.state)
        for sequence in [each for each in self._order if each.stock is not None]:
            self._step_outside(sequence)
        reading = self._choose_repair(self._turns.next(self._in_arena()))
        if self.memory.sequences:
            self._step_batch(reading)
        else:
            self.counts.steps += 1

    def _step_batch(self, reading: abc.Sequence[Sequence]) -> None:
        """One step of the sequences in the arena: prompts of `reading` and decode in one forward."""
        started, in_arena = time.perf_counter(), self.memory.sequences
        namespace = in_arena[0].request.namespace
        decoding = sum(sequence.is_decoding for sequence in in_arena)
        budget = self._pace.budget(decoding, len(in_arena) - decoding)
        fills = fills_of(reading, budget)
        if first := sum(speaks_first(each, fills) for each in in_arena):  # their last tokens come on top
            fills = fills_of(reading, max(min(1, budget), budget - first))
        for sequence, fill in fills.values():
            sequence.computed_from = min(sequence.computed_from, fill.segment.end)
        prompt_tokens = sum(len(each.extension.token_ids) for each in fills.values())
        speaking = [each for each in in_arena if each.is_decoding or speaks_first(each, fills)]
        self.memory.prepare_lanes(speaking)
        feeding = [(fill.extension, None) for fill in fills.values()]
        failed = self._forward([*feeding, *((each.next_extension, each) for each in speaking)])
        self.counts.steps += 1
        self.counts.decoded_tokens += len(speaking)
        self.counts.prefilled_tokens += prompt_tokens
        self._storer.reading = Reading()  # for all that is stored now: the same forward computed it
        for sequence in speaking:
            sequence.is_decoding = True
            self._deliver(sequence, failed.get(id(sequence)))
        self._pace.record(time.perf_counter() - started, len(speaking), prompt_tokens)
        for sequence in self._in_arena():
            if not self._offline:
                self._storer.store_piece(sequence)
            if not sequence.answers and sequence.unfilled is None:
                self.leave(sequence)
        if prompt_tokens and self._storer.has_changed(namespace):
            self.clear()  # behind the reading before the forward: of which model this text is, nobody knows
        self._storer.reading = None

    def _in_arena(self) -> list[Sequence]:
        """Sequences in the arena, in order of arrival."""
        return [each for each in self._order if each.stock is None]

    def _choose_repair(self, reading: abc.Sequence[Sequence]) -> abc.Sequence[Sequence]:
        """Choose which reused tokens are computed again, for the first sequence that waits for that.

        One at a time, unless offline: a strategy may run the model, and the others wait for it. Returns those
        that are left.
        """
        waiting = [
            each
            for each in reading
            if each.awaits_choice and each.unfilled is not None and each.unfilled.is_private
        ]
        for sequence in waiting if self._offline else waiting[:1]:
            self._choose_or_fail(sequence)
        return [each for each in reading if each in self._order]

    def _choose_or_fail(self, sequence: Sequence) -> None:
        try:
            choose_repair(self._parts.model, self.memory, self.packed, sequence, self.state)
        except Exception as error:  # a strategy of the caller's own, or OOM: the others go on
            self._drop(sequence)
            sequence.listener.failed(error)

    def _deliver(self, sequence: Sequence, error: Exception | None) -> None:
        """Hand out a sequence's new token, its result, or why there is none."""
        if error is not None:
            self._drop(sequence)
            sequence.listener.failed(error)
        elif not sequence.is_sampled or sequence.sampler.finished_at is not None:
            self.leave(sequence)
        else:
            sequence.listener.token(sequence.sampler.new_ids[-1])

    def _step_outside(self, sequence: Sequence) -> None:
        """One token for a sequence outside the arena."""
        assert sequence.stock is not None
        if not sequence.is_sampled:  # its prompt was to be computed for later ones, and it cannot be stored
            self.leave(sequence)
            return
        request, sampler = sequence.request, sequence.sampler
        self._parts.fit.begin([request])
        new_ids = np.asarray(sampler.new_ids, dtype=np.int64)
        error: Exception | None = None
        try:
            logits = sequence.stock.next_logits(
                np.concatenate([request.token_ids, new_ids]), request.namespace
            )
            sampler.append(int(sampler.choose(logits)))
            self.counts.decoded_tokens += 1
        except Exception as raised:  # a processor of the request, or OOM: the others go on
            error = raised
        self._deliver(sequence, error)

    def _forward(self, parts: list[tuple[Extension, Sequence | None]]) -> dict[int, Exception]:
        """Run the extensions and choose their sequences' next tokens; returns what failed, by sequence id."""
        parts.sort(key=lambda part: _prefix_key(part[0].segment))
        failed: dict[int, Exception] = {}
        with decode.running(self._parts.model, fast=True, was_read=True):
            for forward in self.packed.extend([each for each, _ in parts], self.state):
                speaking: dict[int, Sequence] = {}  # by row
                for number, first, row, count in forward.spans:
                    sequence = parts[number][1]
                    assert sequence is not None
                    if sequence.scores is not None:
                        sequence.scores(sequence.request.limit + first, forward.logits[row : row + count])
                    else:
                        speaking[row] = sequence
                samplers = {row: sequence.sampler for row, sequence in speaking.items()}
                for row, error in choose_tokens(forward, samplers).items():
                    failed[id(speaking[row])] = error
        return failed

    # --- leave -------------------------------------------------------------------------------

    def leave(self, sequence: Sequence) -> None:
        """Let a request go, with the answer that it has; what was computed is stored, its slots are free."""
        if sequence not in self._order:
            return
        request = sequence.request
        decoded, finished_at = decode.Decoded(), None
        if sequence.is_sampled:
            decoded, finished_at = sequence.sampler.decoded(), sequence.sampler.finished_at
        if not decoded.token_ids:
            decoded.first_token_at = time.perf_counter()
        if sequence.is_sampled and finished_at is None:
            decoded.finish_reason = "cancelled"
        text = self._parts.reader.decode(decoded.token_ids) if decoded.token_ids else ""
        if decoded.token_ids and finished_at is not None:
            sequence.listener.token(decoded.token_ids[-1])
        result = request.result(decoded, sequence.spans, text, finished_at)
        sequence.listener.done(result)
        if sequence.stock is None:
            self._storer.store(sequence, Answer(len(request.prompt), decoded.token_ids, text))
        if sequence.answers:
            self._count_request(sequence, result.cached_tokens)
        self._drop(sequence)

    def _count_request(self, sequence: Sequence, cached_tokens: int) -> None:
        token_s, computed = self._pace.token_s, len(sequence.request.prompt) - cached_tokens
        self._parts.recorder.count(
            sequence.request,
            sequence.plan if sequence.stock is None else None,
            cached_tokens,
            len(sequence.recomputed) if sequence.stock is None else 0,
            reason=sequence.stock.reason if sequence.stock is not None else "",
            prefill_seconds=computed * token_s if token_s else None,
        )

    def _drop(self, sequence: Sequence) -> None:
        """Forget a sequence, and free its slots."""
        self._order.remove(sequence)
        if sequence.stock is None:
            self.memory.free(sequence)

    def fail_all(self, error: Exception) -> None:
        """Tell all requests that there is no answer, and begin anew."""
        self.counts.failed_steps += 1
        sequences = self.sequences
        self._order = []
        self.memory.reset()
        for sequence in sequences:
            sequence.listener.failed(error)
        # Last, since it may fail too: the device may be gone.
        self.memory.arena.clear(0, self.memory.lane_slots)

    def clear(self) -> None:
        """Forget the text that lies in the arena; sequences in the batch go on."""
        self.memory.radix_tree.clear()


def _prefix_key(segment: Segment) -> tuple[int, ...]:
    """Sort key: sequences that share a prefix become adjacent, and a segment comes before those behind it."""
    return tuple(each.start for each in segment.before)
