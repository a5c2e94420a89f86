"""The content index: where stored text stands again in a prompt, at any offset.

Stored text is indexed by windows of 32 tokens at multiples of 32 of its own positions. All windows
of a prompt are hashed at once and looked up; what is found is compared token by token and extended
both ways along the prefix tree. Any 63 tokens in a row contain a whole stored window, so a common run
of 63 tokens or more is found wherever it stands; a shorter one only if a window lies inside.
Knows tree nodes and tokens only: no KV, no budget, no namespaces and no locks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvboost.store.prefix_tree import TOKEN_BYTES, TreeNode, walk

WINDOW_TOKENS = 32
MAX_PLACES = 8  # of the places that share a window, how many are looked at
MAX_ALIGNMENTS = 16  # how many alignments compete for one run
CONTEXT_TOKENS = 256  # how far before a run the donor's text is compared, or counts as text at all
MIN_SLOTS = 1024
FREE_SLOTS_PER_HASH = 8  # at least: so at most one absent window in 8 costs a look-up

# Odd numbers without pattern; one per doubling, for with the same one inner halves could change places.
_TOKEN_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = np.array(
    [0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53, 0xD6E8FEB86659FD93],
    dtype=np.uint64,
)
_FOLD = np.uint64(29)

Ids = NDArray[np.uint32]
Place = tuple[TreeNode, int]  # the node with a window's last token, and the window's text position
Places = dict[Place, None]  # in the order in which they were added
Hit = tuple[int, Places]  # a prompt position, and where its window is stored


@dataclass(frozen=True)
class FoundPiece:
    """Prompt tokens `[start, end)` stand in `node`, from its token number `offset` on."""

    node: TreeNode
    start: int
    end: int
    offset: int


@dataclass(frozen=True)
class FoundRun:
    """Prompt tokens `[start, end)` as neighbouring pieces of one stored text, in order."""

    start: int
    end: int
    pieces: tuple[FoundPiece, ...]


@dataclass(frozen=True)
class _Alignment:
    """A run that competes: prompt token `i` is token `i + shift` of the text of `nodes`."""

    nodes: tuple[TreeNode, ...]
    shift: int
    start: int
    end: int

    @property
    def begin(self) -> int:
        """Where it begins in the stored text."""
        return self.start + self.shift

    def to_run(self) -> FoundRun:
        pieces = []
        for node in self.nodes:
            start = max(self.start, node.start - self.shift)
            end = min(self.end, node.end - self.shift)
            pieces.append(FoundPiece(node, start, end, start + self.shift - node.start))
        return FoundRun(self.start, self.end, tuple(pieces))


def window_hashes(ids: Ids) -> NDArray[np.uint64]:
    """A hash of every window of 32 tokens in `ids`, by the position of its first token.

    A hash of 2w tokens is made of two hashes of w tokens, so five steps over all positions suffice.
    """
    hashes = ids.astype(np.uint64) * _TOKEN_MULTIPLIER
    width = 1
    for multiplier in _MULTIPLIERS:
        left = hashes[:-width]
        hashes = (left ^ (left >> _FOLD)) * multiplier + hashes[width:]
        width *= 2
    return hashes


class ContentIndex:
    """The windows of all nodes that were added, by hash. `find` changes nothing."""

    def __init__(self) -> None:
        self._places: dict[int, Places] = {}
        self._holes: dict[int, int] = {}  # by hash: places taken out since its dict was made
        self._counts = np.zeros(MIN_SLOTS, dtype=np.uint32)  # by the hash's first bits: hashes held
        self._num_windows = 0

    def __len__(self) -> int:
        """The number of windows held."""
        return self._num_windows

    def add(self, node: TreeNode) -> None:
        """Index the windows that end in `node`, which is in its tree already."""
        for value, position in _own_windows(node):
            places = self._places.get(value)
            if places is None:
                places = self._places[value] = {}
                self._counts[value >> self._shift] += 1
            elif (node, position) in places:
                raise ValueError("the node is indexed already")
            places[node, position] = None
            self._num_windows += 1
        while len(self._places) * FREE_SLOTS_PER_HASH > len(self._counts):
            self._counts = self._count(2 * len(self._counts))

    def discard(self, node: TreeNode) -> None:
        """Forget the windows that end in `node`, before or after it leaves its tree.

        Nodes below it should have gone before: their windows may begin in it. KeyError if it is not indexed.
        """
        for value, position in _own_windows(node):
            places = self._places[value]
            del places[node, position]
            self._num_windows -= 1
            if not places:
                del self._places[value]
                self._holes.pop(value, None)
                self._counts[value >> self._shift] -= 1
                continue
            # A dict steps over the holes at its ends every time; a fresh one is paid for by the removals.
            self._holes[value] = self._holes.get(value, 0) + 1
            if self._holes[value] > len(places) + MAX_PLACES:
                self._places[value] = dict.fromkeys(places)
                del self._holes[value]

    def find(
        self,
        tokens: bytes,
        start: int,
        end: int,
        *,
        min_tokens: int = WINDOW_TOKENS,
        rank: Callable[[TreeNode], Any] = lambda _: 0,
    ) -> list[FoundRun]:
        """Disjoint runs of stored text in the prompt's tokens `[start, end)`, in order of their starts.

        `tokens` are those of the whole prompt. Each run is the longest of those that have a window within
        32 positions from the first hit behind the run before; among equals the one whose text agrees
        longest with the prompt before the run, then the one whose first node has the highest `rank`, then
        the one with the most text before it, of which 256 tokens count: what was read first of all holds
        an attention sink. Runs shorter than `min_tokens` are left out; less than 32 cannot be asked for, a
        window is needed.
        """
        prompt = tokens[: end * TOKEN_BYTES]
        ids = np.frombuffer(prompt, dtype="<u4")
        hits = self._hits(ids, start)
        positions = [position for position, _ in hits]
        runs: list[FoundRun] = []
        front = start
        place = 0
        while place < len(hits):
            behind = bisect_left(positions, positions[place] + WINDOW_TOKENS, place)
            equal = _longest(hits[place:behind], prompt, ids, front)
            if equal and equal[0].end - equal[0].start >= min_tokens:
                best = max(
                    equal,
                    key=lambda run: (_context(run, ids), rank(run.nodes[0]), min(run.begin, CONTEXT_TOKENS)),
                )
                runs.append(best.to_run())
                front = best.end
                behind = bisect_left(positions, front, place)
            place = behind  # also behind hits that were too short: looking again would find no more
        return runs

    def check_integrity(self, nodes: Iterable[TreeNode]) -> None:
        """Raise AssertionError unless exactly the windows of `nodes` are held, and counted rightly."""
        expected = {(value, (node, position)) for node in nodes for value, position in _own_windows(node)}
        held = [(value, place) for value, places in self._places.items() for place in places]
        if set(held) != expected or len(held) != self._num_windows:
            raise AssertionError(f"{len(held)} windows are held, {self._num_windows} counted")
        if not np.array_equal(self._counts, self._count(len(self._counts))):
            raise AssertionError("the table of present hashes is wrong")
        if any(holes > len(self._places[value]) + MAX_PLACES for value, holes in self._holes.items()):
            raise AssertionError("places that are gone are stepped over for ever")

    @property
    def _shift(self) -> int:
        """What is left of a hash behind this many bits is its slot."""
        return 65 - len(self._counts).bit_length()

    def _hits(self, ids: Ids, start: int) -> list[Hit]:
        """The positions from `start` on whose window is stored, or has the hash of one that is."""
        hashes = window_hashes(ids[start:])
        present = np.flatnonzero(self._counts[(hashes >> np.uint64(self._shift)).view(np.int64)])
        values = hashes[present].tolist()
        found = zip((present + start).tolist(), map(self._places.get, values), strict=True)
        return [(position, places) for position, places in found if places is not None]

    def _count(self, num_slots: int) -> NDArray[np.uint32]:
        """The hashes held, counted by their first bits. 32 bits per count: it cannot overflow."""
        values = np.fromiter(self._places, dtype=np.uint64, count=len(self._places))
        slots = (values >> np.uint64(65 - num_slots.bit_length())).view(np.int64)
        return np.bincount(slots, minlength=num_slots).astype(np.uint32)


def _own_windows(node: TreeNode) -> list[tuple[int, int]]:
    """Hash and text position of each window whose last token stands in `node`."""
    first, last = node.start // WINDOW_TOKENS * WINDOW_TOKENS, node.end // WINDOW_TOKENS * WINDOW_TOKENS
    if first == last:
        return []
    parts = []
    above: TreeNode | None = node
    while above is not None and above.end > first:
        parts.append(above.tokens[max(0, first - above.start) * TOKEN_BYTES :])
        above = above.parent
    text = np.frombuffer(b"".join(reversed(parts)), dtype="<u4")
    hashes = window_hashes(text[: last - first])[::WINDOW_TOKENS]
    return list(zip(hashes.tolist(), range(first, last, WINDOW_TOKENS), strict=True))


def _longest(hits: list[Hit], prompt: bytes, ids: Ids, front: int) -> list[_Alignment]:
    """The longest run through one of these hits, or several of one length; none begins before `front`."""
    found: dict[tuple[TreeNode, int], _Alignment] = {}
    for position, (node, window) in islice(_candidates(hits), MAX_ALIGNMENTS):
        shift = window - position
        first, begin = _agree_backwards(node, window + WINDOW_TOKENS, ids, shift, front)
        if begin > window:  # only the hash agreed
            continue
        if (first, shift) not in found:  # siblings that share the window share the way from `first` on
            found[first, shift] = _extend(first, begin, shift, prompt, ids)
    longest = max((run.end - run.start for run in found.values()), default=0)
    return [run for run in found.values() if run.end - run.start == longest]


def _candidates(hits: list[Hit]) -> Iterator[tuple[int, Place]]:
    """Where the windows of these hits are stored, those of the rarest window first.

    A window that few texts have says most about which text this is; boilerplate comes last.
    """
    for position, places in sorted(hits, key=lambda hit: len(hit[1])):
        for place in _some(places):
            yield position, place


def _some(places: Places) -> Iterator[Place]:
    """The newest first; of many also the oldest, for that is where a text that repeats itself begins."""
    if len(places) <= MAX_PLACES:
        return reversed(places)
    return chain(islice(reversed(places), MAX_PLACES - 1), islice(places, 1))


def _agree_backwards(node: TreeNode, at: int, ids: Ids, shift: int, floor: int) -> tuple[TreeNode, int]:
    """Go back from text position `at` in `node` while the text agrees with the prompt `ids`.

    Stops at prompt position `floor` and where the text begins. Returns the node and the text position
    where the agreement begins; the position is `at` if nothing agrees.
    """
    first = node
    while True:
        low = max(node.start, floor + shift)
        stored = np.frombuffer(node.tokens, dtype="<u4")[low - node.start : at - node.start]
        same = _leading(stored[::-1], ids[low - shift : at - shift][::-1])
        at -= same
        if same:
            first = node
        if at > node.start or at == floor + shift or node.parent is None:
            return first, at
        node = node.parent


def _extend(first: TreeNode, begin: int, shift: int, prompt: bytes, ids: Ids) -> _Alignment:
    """Follow the prompt from text position `begin` in `first`, through `first` and the nodes below."""
    start = begin - shift
    stored = np.frombuffer(first.tokens, dtype="<u4")[begin - first.start :]
    end = start + _leading(stored, ids[start : first.end - shift])
    if end + shift < first.end or not first.children:
        return _Alignment((first,), shift, start, end)
    way = walk(first, prompt, origin=shift)
    tail = () if way.partial is None else (way.partial,)
    return _Alignment((first, *way.path, *tail), shift, start, way.length - shift)


def _context(run: _Alignment, ids: Ids) -> int:
    """How many tokens right before the run agree too; some may if it begins where another one ended."""
    floor = max(0, run.start - CONTEXT_TOKENS)
    return run.begin - _agree_backwards(run.nodes[0], run.begin, ids, run.shift, floor)[1]


def _leading(left: Ids, right: Ids) -> int:
    """The number of leading ids that agree, at a cost that follows that number."""
    size = min(len(left), len(right))
    done, block = 0, 128
    while done < size:
        stop = min(done + block, size)
        differ = left[done:stop] != right[done:stop]
        place = int(differ.argmax())
        if differ[place]:
            return done + place
        done, block = stop, 2 * block
    return size
