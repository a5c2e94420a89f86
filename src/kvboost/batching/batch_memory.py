"""The arena of the running batch: a lane for every sequence, and a radix tree of prompts behind the lanes.

A lane takes the tokens of an answer. Lanes are adjacent and of one size, so that one call of attention reads
them all. Knows slots and sequences, no model and no store.
"""

from __future__ import annotations

from kvboost.batching.radix_tree import Node, RadixTree
from kvboost.batching.sequence import Sequence, prefill_tokens
from kvboost.batching.slot_pool import SlotPool
from kvboost.kv.arena import Arena
from kvboost.requests.request import Request
from kvboost.run.packed_step import Segment

# Exact text before private text is a node of its own from so many tokens on: a short one costs more in every
# step than it saves once.
_LEAST_BEFORE_PRIVATE = 64
_STAGED_TOKENS = 1_024  # capacities of the arena in which a repair is prepared are multiples of this
LANE_TOKENS = 256  # of an answer; a longer one spills into the pool, so that lanes stay equal
_TAIL_SHARE = 2  # the end of a prompt is pulled into its lane where it is at most the lane's size by this


class BatchMemory:
    """Slots for lanes of `lane_tokens`, and for `max_tokens` tokens of prompts and of longer answers.

    There is a lane for each of `max_sequences`; `arena` has as many slots as that takes, or more.
    """

    def __init__(self, arena: Arena, max_sequences: int, max_tokens: int, lane_tokens: int) -> None:
        self.max_sequences = max_sequences
        self.max_tokens = max_tokens
        self.lane_tokens = lane_tokens
        self.arena = arena
        self.radix_tree = self._empty_tree()
        self.sequences: list[Sequence] = []  # by lane
        self._staging: Arena | None = None

    @property
    def nbytes(self) -> int:
        """Memory of the arenas."""
        return self.arena.nbytes + (self._staging.nbytes if self._staging is not None else 0)

    @property
    def lane_slots(self) -> int:
        """Slots of all lanes; the pool of the radix tree begins behind them."""
        return self.max_sequences * self.lane_tokens

    @property
    def max_slots(self) -> int:
        return self.lane_slots + self.max_tokens

    @property
    def spare_slot(self) -> int | None:
        """A slot that no sequence ever gets, if there is one."""
        return self.max_slots if self.arena.capacity > self.max_slots else None

    def probe_slots(self, tokens: int) -> int | None:
        """The first of `tokens` slots that no sequence ever gets, on a GPU that has them."""
        first = self.max_slots + 1  # behind the spare one
        on_gpu = self.arena.slabs[0].device.type == "cuda"
        return first if on_gpu and self.arena.capacity >= first + tokens else None

    def _empty_tree(self) -> RadixTree:
        return RadixTree(SlotPool(self.lane_slots, self.lane_slots + self.max_tokens))

    # --- coming and going --------------------------------------------------------------------

    def has_room(
        self, request: Request, exact_tokens: int, *, answers: bool, spare_tokens: int, in_tree: int | None
    ) -> bool:
        """Whether there are slots for a request, and `spare_tokens` more for others.

        Behind its first `exact_tokens` tokens its path is private.
        """
        reserved = sum(each.reserved for each in self.sequences)
        tokens = request.token_ids[: prefill_tokens(request, answers=answers, in_tree=in_tree)]
        shared = _shared(exact_tokens, len(tokens))
        needed, there = self.radix_tree.room_for(request.namespace.key, tokens, reserved, shared)
        spilled = self.spill_tokens(request, answers=answers, in_tree=in_tree)
        return needed + spilled + spare_tokens <= there

    def enter(self, sequence: Sequence, exact_tokens: int) -> None:
        """Give a sequence its path in the radix tree, and the next lane. Its new nodes are not filled.

        Behind `exact_tokens` tokens no other may find its path.
        """
        tokens = sequence.request.token_ids[: sequence.limit]
        key = sequence.request.namespace.key
        shared = _shared(exact_tokens, len(tokens))
        sequence.node, sequence.in_place = self.radix_tree.enter(key, tokens[:shared])
        if shared < len(tokens):
            try:
                sequence.node = self.radix_tree.enter_private(sequence.node, tokens[shared:])
            except ValueError:
                self.radix_tree.leave(sequence.node)
                raise
        sequence.reserved = self.spill_tokens(
            sequence.request, answers=sequence.answers, in_tree=sequence.in_tree
        )
        start = len(self.sequences) * self.lane_tokens
        self.arena.clear(start, start + self.lane_tokens)  # read under a mask, which does not stop a NaN
        sequence.lane = Segment(start, self.lane_tokens, sequence.segments, clean=True)
        self.sequences.append(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Take back what `enter` gave; what was placed in its nodes is not trusted."""
        for node in sequence.own_nodes:
            node.segment.length = 0
        self.free(sequence)

    def staged(self, tokens: int) -> Arena:
        """An arena for `tokens` tokens of one sequence, from slot 0 on; it is used again and again."""
        if self._staging is None or self._staging.capacity < tokens:
            self._staging = Arena(self.arena.layout, -(-tokens // _STAGED_TOKENS) * _STAGED_TOKENS)
        return self._staging

    def free(self, sequence: Sequence) -> None:
        """Free a sequence's slots; the last lane moves into its place, so that lanes stay adjacent."""
        for segment in sequence.spilled:
            self.radix_tree.pool.give(segment.start, segment.start + segment.capacity)
        self.radix_tree.leave(sequence.node)
        at, last = self.sequences.index(sequence), self.sequences.pop()
        if last is not sequence:
            self.sequences[at] = last
            self.arena.move(last.lane.start, at * self.lane_tokens, last.lane.length)
            self.arena.clear(at * self.lane_tokens + last.lane.length, (at + 1) * self.lane_tokens)
            last.lane.start = at * self.lane_tokens

    def reset(self) -> None:
        """Forget all sequences and all text, in use or not."""
        self.sequences = []
        self.radix_tree = self._empty_tree()

    def spill_tokens(self, request: Request, *, answers: bool, in_tree: int | None = None) -> int:
        """Slots beside its lane that an answer may need; none where the rest of its prompt fits in it."""
        return spill_tokens(request, self.lane_tokens) if answers and in_tree is None else 0

    # --- lanes -------------------------------------------------------------------------------

    def prepare_lanes(self, decoding: list[Sequence]) -> None:
        """Make room for a token in every lane, behind all that comes before it."""
        for sequence in decoding:
            if sequence.is_decoding and not sequence.tail_pulled:
                self._pull_tail(sequence)
            if sequence.lane.length == sequence.lane.capacity:
                self._spill(sequence)
            sequence.lane.before = sequence.segments

    def _pull_tail(self, sequence: Sequence) -> None:
        """Copy the end of a prompt that no other sequence uses into its sequence's lane.

        There the one call for all lanes reads it; as a node of its own it would take a call per layer.
        """
        sequence.tail_pulled = True
        own: list[Node] = []
        count, most = 0, _most_pulled(sequence.request, self.lane_tokens)
        for node in sequence.node.path[::-1]:
            if node.users > 1 or count + len(node.tokens) > most:
                break
            own.insert(0, node)
            count += len(node.tokens)
        lane = sequence.lane
        if not count or lane.length > count or sequence.spilled:
            return
        self.arena.move(lane.start, lane.start + count, lane.length)
        at = lane.start
        for node in own:
            self.arena.move(node.segment.start, at, len(node.tokens))
            at += len(node.tokens)
        sequence.node = self.radix_tree.release(own)
        sequence.lane = Segment(lane.start, self.lane_tokens, sequence.segments, clean=True)
        sequence.lane.length = count + lane.length

    def _spill(self, sequence: Sequence) -> None:
        """Move a full lane's KV into the pool, and empty the lane."""
        lane = sequence.lane
        position = lane.position
        done = 0
        for start, end in self.radix_tree.take(lane.length):
            self.arena.move(lane.start + done, start, end - start)
            part = Segment(start, end - start, sequence.segments)
            part.length = end - start
            sequence.spilled.append(part)
            done += end - start
        sequence.reserved = max(0, sequence.reserved - lane.length)
        sequence.lane = Segment(lane.start, self.lane_tokens, sequence.segments, clean=True)
        assert sequence.lane.position == position + done


def _shared(exact_tokens: int, tokens: int) -> int:
    """How many of a prompt's `tokens` tokens, the first `exact_tokens` of them exact, others may find."""
    return exact_tokens if exact_tokens >= min(_LEAST_BEFORE_PRIVATE, tokens) else 0


def _most_pulled(request: Request, lane_tokens: int) -> int:
    """How long the end of a prompt may be that is pulled into a lane."""
    return max(lane_tokens // _TAIL_SHARE, lane_tokens - request.options.max_new_tokens)


def spill_tokens(request: Request, lane_tokens: int) -> int:
    """Slots beside its lane that an answer may need."""
    in_lane = request.options.max_new_tokens + _most_pulled(request, lane_tokens)
    return (-(-in_lane // lane_tokens) - 1) * lane_tokens
