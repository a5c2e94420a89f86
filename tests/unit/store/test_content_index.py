"""The content index against a brute-force reading of its rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvboost.models import token_bytes
from kvboost.store import content_index
from kvboost.store.content_index import (
    CONTEXT_TOKENS,
    MAX_ALIGNMENTS,
    MAX_PLACES,
    WINDOW_TOKENS,
    ContentIndex,
    FoundRun,
    window_hashes,
)
from kvboost.store.prefix_tree import TOKEN_BYTES, TreeNode, below, insert, remove, walk

Ids = list[int]
SURE_TOKENS = 2 * WINDOW_TOKENS - 1  # every common run of this length holds a whole window


def random_ids(random: Random, count: int, vocabulary: int = 50_000) -> Ids:
    return [random.randrange(vocabulary) for _ in range(count)]


def ids_of(raw: bytes) -> Ids:
    return np.frombuffer(raw, dtype="<u4").tolist()


def text_of(node: TreeNode) -> Ids:
    """All tokens from the root to the end of `node`."""
    return (text_of(node.parent) if node.parent is not None else []) + ids_of(node.tokens)


class Store:
    """Trees and an index over all their nodes, filled the way the chunk store does it."""

    def __init__(self) -> None:
        self.index = ContentIndex()
        self.roots = [TreeNode("first", b"", None), TreeNode("second", b"", None)]
        self.count = 0

    def put(self, ids: Ids, chunk: int = 128, root: int = 0, *, value: Any = None) -> TreeNode:
        raw = token_bytes(ids)
        node = walk(self.roots[root], raw).node
        while node.end < len(ids):
            tokens = raw[node.end * TOKEN_BYTES :][: chunk * TOKEN_BYTES]
            same = [child for child in node.children if child.tokens == tokens]
            node = same[0] if same else self.insert(node, tokens, value)
        return node

    def insert(self, parent: TreeNode, tokens: bytes, value: Any = None) -> TreeNode:
        self.count += 1
        node = insert(parent, tokens, str(self.count), value)
        self.index.add(node)
        return node

    def nodes(self) -> list[TreeNode]:
        return [node for root in self.roots for node in below(root)]

    def find(self, prompt: Ids, start: int = 0, end: int | None = None, **options: Any) -> list[FoundRun]:
        """What the index finds, after the checks that hold for every answer."""
        end = len(prompt) if end is None else end
        runs = self.index.find(token_bytes(prompt), start, end, **options)
        check_sound(runs, prompt, start, end, options.get("min_tokens", WINDOW_TOKENS))
        return runs


def check_sound(runs: list[FoundRun], prompt: Ids, start: int, end: int, min_tokens: int) -> None:
    """Every run is true, in bounds and as long as it can be; runs and pieces do not overlap."""
    front = start
    for run in runs:
        assert front <= run.start < run.end <= end
        assert run.end - run.start >= max(min_tokens, WINDOW_TOKENS)
        at = run.start
        for number, piece in enumerate(run.pieces):
            assert piece.start == at < piece.end
            stored = ids_of(piece.node.tokens)[piece.offset : piece.offset + piece.end - piece.start]
            assert stored == prompt[piece.start : piece.end]
            if number:
                assert piece.offset == 0
                assert piece.node.parent is run.pieces[number - 1].node
            if number < len(run.pieces) - 1:
                assert piece.offset + piece.end - piece.start == len(piece.node.tokens) // TOKEN_BYTES
            at = piece.end
        assert at == run.end
        first, last = run.pieces[0], run.pieces[-1]
        before = text_of(first.node)[: first.node.start + first.offset]
        assert run.start == front or not before or before[-1] != prompt[run.start - 1]
        stop = last.offset + last.end - last.start
        inside = ids_of(last.node.tokens)[stop : stop + 1]
        follows = inside or [ids_of(child.tokens)[0] for child in last.node.children]
        assert run.end == end or prompt[run.end] not in follows
        front = run.end


# --- the rules, read by brute force ---------------------------------------------------------------------

Window = tuple[TreeNode, int, tuple[int, ...]]


def windows_of(store: Store) -> list[Window]:
    found: list[Window] = []
    for node in store.nodes():
        text = text_of(node)
        found += [
            (node, at, tuple(text[at : at + WINDOW_TOKENS]))
            for at in range(0, node.end - WINDOW_TOKENS + 1, WINDOW_TOKENS)
            if at + WINDOW_TOKENS > node.start
        ]
    return found


def agreeing(left: Sequence[int], right: Sequence[int]) -> int:
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count


def check_choices(
    store: Store, runs: list[FoundRun], prompt: Ids, start: int, end: int, min_tokens: int, rank: Any
) -> None:
    """Follow the scan with naive means; at each step the run taken must be one of the best."""
    stored = windows_of(store)
    texts = [(node, text_of(node)) for node in store.nodes()]
    at: dict[int, list[tuple[TreeNode, int]]] = {}
    for position in range(start, end - WINDOW_TOKENS + 1):
        wanted = tuple(prompt[position : position + WINDOW_TOKENS])
        places = [(node, window) for node, window, ids in stored if ids == wanted]
        if places:
            at[position] = places
    front, left = start, list(runs)
    while hits := sorted(position for position in at if position >= front):
        group = [position for position in hits if position < hits[0] + WINDOW_TOKENS]
        complete = sum(len(at[position]) for position in group) <= MAX_ALIGNMENTS
        complete = complete and all(len(at[position]) <= MAX_PLACES for position in group)
        keys = []
        for position in group:
            for node, window in at[position]:
                shift = window - position
                above = text_of(node)[:window]
                back = agreeing(above[::-1], prompt[front:position][::-1])
                begin = window - back
                context = agreeing(above[:begin][::-1], prompt[: position - back][::-1][:CONTEXT_TOKENS])
                first = node
                while first.start > begin:
                    assert first.parent is not None
                    first = first.parent
                longest = max(
                    agreeing(text[begin:], prompt[begin - shift : end])
                    for last, text in texts
                    if text[: first.end] == text_of(first) and is_under(last, first)
                )
                keys.append((longest, context, rank(first), min(begin, CONTEXT_TOKENS)))
        best = max(keys)
        if left and not own_windows(left[0]).isdisjoint(group):
            run = left.pop(0)
            piece = run.pieces[0]
            before = text_of(piece.node)[: piece.node.start + piece.offset]
            context = agreeing(before[::-1], prompt[: run.start][::-1][:CONTEXT_TOKENS])
            begin = min(len(before), CONTEXT_TOKENS)
            key = (run.end - run.start, context, rank(piece.node), begin)
            assert key in keys
            assert key == best or not complete
            front = run.end
        else:
            assert best[0] < min_tokens or not complete
            at = {position: places for position, places in at.items() if position > group[-1]}
    assert not left


def own_windows(run: FoundRun) -> set[int]:
    """The prompt positions in a run where its text has a window."""
    shift = run.pieces[0].node.start + run.pieces[0].offset - run.start
    return {at for at in range(run.start, run.end - WINDOW_TOKENS + 1) if (at + shift) % WINDOW_TOKENS == 0}


def is_under(node: TreeNode | None, above: TreeNode) -> bool:
    while node is not None and node is not above:
        node = node.parent
    return node is above


def gaps(runs: list[FoundRun], start: int, end: int) -> Iterator[tuple[int, int]]:
    for run in runs:
        yield start, run.start
        start = run.end
    yield start, end


@st.composite
def scenarios(draw: st.DrawFn) -> tuple[Store, Ids]:
    """Texts and a prompt put together from the same few segments, over a small vocabulary."""
    random = Random(draw(st.integers(0, 2**32)))
    vocabulary = draw(st.sampled_from([1, 2, 3, 1000]))
    sizes = draw(st.lists(st.integers(1, 90), min_size=2, max_size=5))
    segments = [random_ids(random, size, vocabulary) for size in sizes]
    mixture = st.lists(st.sampled_from(segments), min_size=1, max_size=4).map(lambda parts: [*chain(*parts)])
    store = Store()
    for root, chunk, text in draw(
        st.lists(
            st.tuples(st.integers(0, 1), st.sampled_from([5, 16, 31, 32, 50, 128, 500]), mixture),
            min_size=1,
            max_size=4,
        )
    ):
        store.put(text, chunk, root, value=random.randrange(2))
    return store, random_ids(random, draw(st.integers(0, 40)), 1000) + draw(mixture)


def rank_by_value(node: TreeNode) -> int:
    return int(node.value)


@given(scenarios(), st.data())
@settings(deadline=None, max_examples=250)
def test_runs_are_those_of_the_rules(scenario: tuple[Store, Ids], data: st.DataObject) -> None:
    store, prompt = scenario
    start = data.draw(st.one_of(st.just(0), st.integers(0, len(prompt))))
    end = data.draw(st.one_of(st.just(len(prompt)), st.integers(start, len(prompt))))
    min_tokens = data.draw(st.sampled_from([1, 32, 40, 70]))
    runs = store.find(prompt, start, end, min_tokens=min_tokens, rank=rank_by_value)
    check_choices(store, runs, prompt, start, end, min_tokens, rank_by_value)
    store.index.check_integrity(store.nodes())


@given(scenarios())
@settings(deadline=None, max_examples=150)
def test_what_is_left_over_holds_no_stored_window(scenario: tuple[Store, Ids]) -> None:
    """So no common run of 63 tokens either, and this with any number of candidates."""
    store, prompt = scenario
    stored = {ids for _, _, ids in windows_of(store)}
    texts = [text_of(node) for node in store.nodes()]
    sure = {tuple(t[i : i + SURE_TOKENS]) for t in texts for i in range(len(t) - SURE_TOKENS + 1)}
    for start, end in gaps(store.find(prompt), 0, len(prompt)):
        for size, known in ((WINDOW_TOKENS, stored), (SURE_TOKENS, sure)):
            assert not any(tuple(prompt[i : i + size]) in known for i in range(start, end - size + 1))


# --- documents ------------------------------------------------------------------------------------------


def covered(runs: list[FoundRun], start: int, end: int) -> int:
    return sum(max(0, min(run.end, end) - max(run.start, start)) for run in runs)


@given(st.integers(0, 2**32), st.integers(80, 2000), st.sampled_from([16, 100, 128, 512, 10_000]))
@settings(deadline=None, max_examples=60)
def test_a_document_is_found_at_any_offset(seed: int, size: int, chunk: int) -> None:
    random = Random(seed)
    document = random_ids(random, size)
    store = Store()
    store.put(random_ids(random, random.randrange(300)) + document + random_ids(random, 50), chunk)
    before = random_ids(random, random.randrange(700))
    runs = store.find(before + document + random_ids(random, random.randrange(100)))
    assert covered(runs, len(before), len(before) + size) >= 0.97 * size
    assert len(runs) == 1


@given(st.integers(0, 2**32))
@settings(deadline=None, max_examples=30)
def test_eight_documents_are_found_in_any_order(seed: int) -> None:
    random = Random(seed)
    documents = [random_ids(random, random.randint(80, 2000)) for _ in range(8)]
    store = Store()
    for document in documents:
        store.put(random_ids(random, random.randrange(200)) + document, root=random.randrange(2))
    prompt: Ids = []
    spans = []
    for document in random.sample(documents, 8):
        prompt += random_ids(random, random.randrange(1, 60))
        spans.append((len(prompt), len(prompt) + len(document)))
        prompt += document
    runs = store.find(prompt)
    assert all(covered(runs, start, end) >= 0.97 * (end - start) for start, end in spans)
    assert len(runs) == 8


@pytest.mark.parametrize("chunk", [128, 5000])
@pytest.mark.parametrize("edit", [100, 127, 128, 129, 383, 384, 385, 1500])
def test_a_changed_token_parts_two_runs(edit: int, chunk: int) -> None:
    text = random_ids(Random(18), 2000)
    store = Store()
    store.put([1, 2, 3, *text], chunk)
    changed = [*text[:edit], 50_001, *text[edit + 1 :]]
    runs = [(run.start, run.end) for run in store.find([4, *changed])]
    assert runs == [(1, 1 + edit), (2 + edit, 2001)]


def test_documents_side_by_side_are_two_runs() -> None:
    random = Random(1)
    first, second = random_ids(random, 300), random_ids(random, 300)
    store = Store()
    store.put(random_ids(random, 45) + first)
    store.put(random_ids(random, 77) + second, root=1)
    assert [(run.start, run.end) for run in store.find([9, *second, *first])] == [(1, 301), (301, 601)]


@pytest.mark.parametrize(("size", "found"), [(31, False), (32, True), (33, True)])
def test_a_short_run_is_found_where_a_window_lies_inside(size: int, found: bool) -> None:
    text = random_ids(Random(2), 200)
    store = Store()
    store.put(text)
    aligned, crooked = text[64 : 64 + size], text[65 : 65 + size]
    assert [(run.start, run.end) for run in store.find([7, *aligned])] == ([(1, 1 + size)] if found else [])
    assert store.find([7, *crooked]) == []
    assert [(run.start, run.end) for run in store.find([7, *text[65:128], 7])] == [(1, 64)]


def test_the_child_chain_that_agrees_longest_is_followed() -> None:
    random = Random(3)
    stem, one, two, three = (random_ids(random, 100) for _ in range(4))
    store = Store()
    for branch in (one, one[:50] + two, one[:70] + three):
        store.put(stem + branch, 100)
    run = store.find([1, 2, *stem[20:], *one[:70], *three])[0]
    assert (run.start, run.end) == (2, 2 + 80 + 170)
    assert [ids_of(piece.node.tokens)[:1] for piece in run.pieces] == [stem[:1], one[:1], three[30:31]]


def test_the_longest_run_is_taken_then_the_context_then_the_rank() -> None:
    random = Random(4)
    shared, ahead = random_ids(random, 120), random_ids(random, 300)
    store = Store()
    shorter = store.put(ahead + shared[:100], 1000, value=9)
    lone = store.put(random_ids(random, 300) + shared, 1000, value=1)
    twin = store.put(random_ids(random, 300) + shared, 1000, value=2)
    plain = [1, *shared]
    assert store.find(plain, rank=rank_by_value)[0].pieces[0].node is twin
    assert store.find(plain, rank=lambda node: -node.value)[0].pieces[0].node is lone
    near = store.put([5, *ahead[-40:], *shared], 1000, value=0)
    prompt = [*ahead, *shared]
    in_full = store.find(prompt, 0, rank=rank_by_value)[0]
    assert in_full.pieces[0].node is shorter
    assert in_full.end - in_full.start == 400
    clipped = store.find(prompt, 300, rank=rank_by_value)[0]  # what stands before `start` counts as context
    assert clipped.pieces[0].node is near
    assert (clipped.start, clipped.end) == (300, 420)


def test_the_rank_is_that_of_the_first_node() -> None:
    random = Random(14)
    shared = random_ids(random, 160)
    store = Store()
    high = store.insert(store.roots[0], token_bytes(random_ids(random, 64) + shared[:60]), 2)
    store.insert(high, token_bytes(shared[60:]), 0)
    low = store.insert(store.roots[1], token_bytes(random_ids(random, 64) + shared[:60]), 1)
    store.insert(low, token_bytes(shared[60:]), 3)
    assert store.find([1, *shared], rank=rank_by_value)[0].pieces[0].node is high


@pytest.mark.parametrize("alone_first", [True, False])
def test_text_read_behind_other_text_is_preferred(alone_first: bool) -> None:
    """Even where it stands in the first node of its tree, as behind a short text it does."""
    random = Random(19)
    shared = random_ids(random, 160)
    texts = [shared, random_ids(random, 40) + shared]
    store = Store()
    nodes = [store.put(text, 1000, value=1) for text in (texts if alone_first else texts[::-1])]
    behind = nodes[1 if alone_first else 0]
    assert store.find([1, *shared], rank=rank_by_value)[0].pieces[0].node is behind
    alone = nodes[0 if alone_first else 1]
    assert store.find([1, *shared], rank=lambda node: node is alone)[0].pieces[0].node is alone


def test_far_and_very_far_behind_other_text_are_the_same() -> None:
    random = Random(20)
    shared = random_ids(random, 160)
    store = Store()
    store.put(random_ids(random, 3 * CONTEXT_TOKENS) + shared, 5000)
    newest = store.put(random_ids(random, CONTEXT_TOKENS) + shared, 5000)
    assert store.find([1, *shared])[0].pieces[0].node is newest


def test_the_context_is_compared_over_some_tokens_only() -> None:
    random = Random(15)
    ahead, shared = random_ids(random, 2 * CONTEXT_TOKENS), random_ids(random, 100)
    store = Store()
    store.put(ahead[-CONTEXT_TOKENS + 1 :] + shared, 1000, value=3)
    near = store.put([1, *ahead[-CONTEXT_TOKENS:], *shared], 1000, value=2)
    store.put(ahead + shared, 1000, value=1)
    found = store.find(ahead + shared, len(ahead), rank=rank_by_value)
    assert [run.pieces[0].node for run in found] == [near]


@pytest.mark.parametrize(("distance", "longer_wins"), [(31, True), (32, False)])
def test_runs_compete_within_one_window_of_the_first_hit(distance: int, longer_wins: bool) -> None:
    random = Random(16)
    early, late = random_ids(random, 40), random_ids(random, 200)
    prompt = early + late
    store = Store()
    store.put(early)
    own = prompt[20:]  # its windows stand where `distance` says: tokens before it shift them
    store.put(random_ids(random, -(distance - 20) % WINDOW_TOKENS) + own, root=1)
    runs = [(run.start, run.end) for run in store.find(prompt)]
    assert runs == ([(20, 240)] if longer_wins else [(0, 40), (40, 240)])


def test_nothing_outside_the_segment_is_reported() -> None:
    text = random_ids(Random(5), 400)
    store = Store()
    store.put(text)
    assert [(run.start, run.end) for run in store.find(text, 50, 210)] == [(50, 210)]
    assert store.find(text, 50, 81) == []
    assert store.find(text, 400, 400) == []
    assert store.find([], 0, 0) == []


# --- adding and discarding ------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 5, 31, 32, 33, 128, 500])
def test_windows_lie_at_multiples_of_32_across_chunk_borders(chunk: int) -> None:
    store = Store()
    store.put(random_ids(Random(6), 1000), chunk)
    assert len(store.index) == 1000 // WINDOW_TOKENS
    store.index.check_integrity(store.nodes())


def test_a_tail_is_replaced_by_a_longer_chunk() -> None:
    random = Random(7)
    text = random_ids(random, 256)
    store = Store()
    tail = store.put(text[:200])
    before = len(store.index)
    store.index.discard(tail)
    assert tail.parent is not None
    remove(tail)
    longer = store.insert(tail.parent, token_bytes(text[128:]))
    assert (before, len(store.index)) == (6, 8)
    assert store.find([3, *text[130:]])[0].pieces[0].node is longer
    store.index.check_integrity(store.nodes())


def test_a_node_is_added_once_and_discarded_once() -> None:
    store = Store()
    node = store.put(random_ids(Random(8), 100))
    with pytest.raises(ValueError, match="already"):
        store.index.add(node)
    store.index.discard(node)
    with pytest.raises(KeyError):
        store.index.discard(node)
    store.index.check_integrity([])


def test_the_table_grows_and_still_knows_every_window() -> None:
    random = Random(9)
    store = Store()
    texts = [random_ids(random, 3200) for _ in range(10)]
    for text in texts:
        store.put(text)
    assert len(store.index._counts) > content_index.MIN_SLOTS
    store.index.check_integrity(store.nodes())
    assert all(covered(store.find([1, *text[1:]]), 1, 3200) == 3199 for text in texts)
    for node in reversed(store.nodes()):  # each after its children
        store.index.discard(node)
    assert len(store.index) == 0
    assert not store.index._counts.any()


def test_removals_leave_no_holes_to_step_over() -> None:
    store = Store()
    shared = [4] * 32
    nodes = [store.insert(store.roots[0], token_bytes([*shared, number])) for number in range(500)]
    for node in nodes[:240] + nodes[260:]:
        store.index.discard(node)
        remove(node)
    store.index.check_integrity(store.nodes())
    assert store.find([*shared, 259])[0].pieces[0].node is nodes[259]
    assert sum(store.index._holes.values()) <= 20 + MAX_PLACES


class IndexMachine(RuleBasedStateMachine):
    """Nodes come and go leaf first, tails grow, and the index always holds just what is there."""

    @initialize(seed=st.integers(0, 2**32))
    def start(self, seed: int) -> None:
        self.random = Random(seed)
        self.store = Store()
        self.segments = [random_ids(self.random, 48, 2), random_ids(self.random, 70), [3] * 64]
        self.texts: list[Ids] = []

    @rule(
        parts=st.lists(st.integers(0, 2), min_size=1, max_size=4),
        chunk=st.sampled_from([7, 32, 60, 500]),
        root=st.integers(0, 1),
    )
    def put(self, parts: list[int], chunk: int, root: int) -> None:
        self.texts.append([*chain(*(self.segments[part] for part in parts))])
        self.store.put(self.texts[-1], chunk, root)

    def leaf(self, data: st.DataObject) -> TreeNode:
        leaves = [node for node in self.store.nodes() if not node.children]
        return leaves[data.draw(st.integers(0, len(leaves) - 1))]

    @precondition(lambda self: self.store.nodes())
    @rule(data=st.data(), first=st.booleans())
    def evict(self, data: st.DataObject, first: bool) -> None:
        leaf = self.leaf(data)
        if first:
            self.store.index.discard(leaf)
        remove(leaf)
        if not first:
            self.store.index.discard(leaf)

    @precondition(lambda self: self.store.nodes())
    @rule(data=st.data(), part=st.integers(0, 2))
    def grow_tail(self, data: st.DataObject, part: int) -> None:
        leaf = self.leaf(data)
        assert leaf.parent is not None
        tokens = leaf.tokens + token_bytes(self.segments[part])
        if tokens in leaf.parent.child_tokens:
            return
        self.store.index.discard(leaf)
        remove(leaf)
        self.store.insert(leaf.parent, tokens)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), cut=st.integers(0, 40))
    def find(self, data: st.DataObject, cut: int) -> None:
        prompt = [9, *data.draw(st.sampled_from(self.texts))[cut:]]
        stored = {ids for _, _, ids in windows_of(self.store)}
        for start, end in gaps(self.store.find(prompt), 0, len(prompt)):
            assert not any(tuple(prompt[i : i + 32]) in stored for i in range(start, end - 31))

    @invariant()
    def holds_what_is_there(self) -> None:
        self.store.index.check_integrity(self.store.nodes())
        assert len(self.store.index) == len(windows_of(self.store))

    def teardown(self) -> None:
        while nodes := self.store.nodes():
            self.store.index.discard(nodes[-1])
            remove(nodes[-1])
        self.store.index.check_integrity([])
        assert len(self.store.index) == 0
        assert not self.store.index._counts.any()


IndexMachine.TestCase.settings = settings(deadline=None, max_examples=40, stateful_step_count=25)
TestIndexMachine = IndexMachine.TestCase


# --- hashes ---------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32), st.integers(0, 100), st.integers(0, 100))
@settings(deadline=None, max_examples=50)
def test_a_window_has_one_hash_wherever_it_stands(seed: int, before: int, behind: int) -> None:
    random = Random(seed)
    window = np.array(random_ids(random, 32, 2**32), dtype=np.uint32)
    text = np.concatenate([random_ids(random, before), window, random_ids(random, behind)]).astype(np.uint32)
    hashes = window_hashes(text)
    assert len(hashes) == before + behind + 1
    assert hashes[before] == window_hashes(window)[0]
    assert len(window_hashes(window[:31])) == 0


def test_windows_that_look_alike_have_other_hashes() -> None:
    rows = [np.zeros(32, dtype=np.uint32)]
    base = np.arange(32, dtype=np.uint32)
    for i in range(32):
        for j in range(i):
            row = base.copy()
            row[[i, j]] = row[[j, i]]
            rows.append(row)
        for value in (1, 2, 256, 2**31):
            row = np.zeros(32, dtype=np.uint32)
            row[i] = value
            rows.append(row)
    rows += [
        np.array([number >> bit & 1 for bit in range(32)], dtype=np.uint32) for number in range(3, 5000, 2)
    ]
    distinct = {tuple(row.tolist()) for row in rows}
    hashes = {int(window_hashes(np.array(row, dtype=np.uint32))[0]) for row in distinct}
    assert len(hashes) == len(distinct)
    assert len({value >> 44 for value in hashes}) > 0.99 * len(hashes)  # the bits that the table goes by


@pytest.mark.parametrize("num_hashes", [1, 3])
@given(scenario=scenarios())
@settings(deadline=None, max_examples=50)
def test_equal_hashes_never_give_a_wrong_run(num_hashes: int, scenario: tuple[Store, Ids]) -> None:
    built, prompt = scenario
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(content_index, "window_hashes", lambda ids: window_hashes(ids) % np.uint64(num_hashes))
        built.index = ContentIndex()
        for node in built.nodes():
            built.index.add(node)
        built.index.check_integrity(built.nodes())
        built.find(prompt, min_tokens=1)
        for node in built.nodes()[::-1]:
            built.index.discard(node)
        built.index.check_integrity([])


def test_a_collision_does_not_hide_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content_index, "window_hashes", lambda ids: window_hashes(ids) % np.uint64(40))
    random = Random(10)
    text, other = random_ids(random, 96), random_ids(random, 96)
    store = Store()
    store.put(text, 96)
    store.put(other, 96)
    assert covered(store.find([1, 2, 3, *text]), 3, 99) == 96


def test_a_window_that_agrees_but_for_a_token_is_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content_index, "window_hashes", lambda ids: window_hashes(ids) % np.uint64(1))
    window = random_ids(Random(17), 32)
    store = Store()
    store.put(window)
    assert store.find([1, *window[1:], 1], min_tokens=1) == []
    assert len(store.find([1, *window, 1], min_tokens=1)) == 1


# --- work -----------------------------------------------------------------------------------------------


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts the alignments that are evaluated and the tokens that they are compared over."""
    counts = {"alignments": 0, "tokens": 0}
    original = content_index._extend
    leading: Callable[..., int] = content_index._leading

    def extend(*arguments: Any) -> Any:
        counts["alignments"] += 1
        run = original(*arguments)
        counts["tokens"] += run.end - run.start
        return run

    def compare(left: Any, right: Any) -> int:
        same = leading(left, right)
        counts["tokens"] += same
        return same

    monkeypatch.setattr(content_index, "_extend", extend)
    monkeypatch.setattr(content_index, "_leading", compare)
    return counts


PERIODS = [[7], [1, 2], [1, 2, 3], list(range(31)), list(range(33)), list(range(1000))]


@pytest.mark.parametrize("chunk", [128, 50_000])
@pytest.mark.parametrize("period", PERIODS, ids=len)
def test_repeating_text_costs_linear_work(work: dict[str, int], period: Ids, chunk: int) -> None:
    size = 50_000
    text = (period * (size // len(period) + 1))[:size]
    store = Store()
    store.put(text, chunk)
    runs = store.index.find(token_bytes(text[5:]), 0, size - 5)
    assert covered(runs, 0, size - 5) >= size - 5 - WINDOW_TOKENS
    assert len(runs) <= 4
    assert work["alignments"] <= MAX_ALIGNMENTS * len(runs)
    assert work["tokens"] <= 4 * MAX_ALIGNMENTS * size


@pytest.mark.parametrize("min_tokens", [32, 64])
def test_hits_that_lead_nowhere_cost_linear_work(work: dict[str, int], min_tokens: int) -> None:
    """Every position of the prompt is a hit on hundreds of texts, and each agrees over 40 tokens only."""
    random = Random(11)
    store = Store()
    for number in range(200):
        store.put([number + 100] * 32 + [7] * 40 + random_ids(random, 100), 128)
    size = 20_000
    runs = store.index.find(token_bytes([7] * size), 0, size, min_tokens=min_tokens)
    assert work["alignments"] <= MAX_ALIGNMENTS * (size // WINDOW_TOKENS)
    assert work["tokens"] <= 4 * 40 * MAX_ALIGNMENTS * (size // WINDOW_TOKENS)
    assert (covered(runs, 0, size) > size - WINDOW_TOKENS) if min_tokens == 32 else (runs == [])


def test_boilerplate_in_many_texts_is_looked_at_in_few(work: dict[str, int]) -> None:
    random = Random(12)
    boilerplate = random_ids(random, 64)
    store = Store()
    texts = [boilerplate + random_ids(random, 60) for _ in range(3_000)]
    nodes = [store.put(text, 200) for text in texts]
    ranked: list[TreeNode] = []
    run = store.find([1, *boilerplate, 1], rank=lambda node: ranked.append(node) or 0)[0]
    assert (run.start, run.end) == (1, 65)
    assert run.pieces[0].node is nodes[-1]  # the newest
    assert len(ranked) <= MAX_PLACES
    assert work["alignments"] <= MAX_ALIGNMENTS
    for node in nodes[100:]:
        store.index.discard(node)
        remove(node)
    assert store.find([1, *boilerplate, 1])[0].pieces[0].node is nodes[99]
    for number in (0, 50, 99):  # what follows tells the texts apart, however many begin alike
        work["alignments"] = 0
        runs = store.find([1, *texts[number]])
        assert covered(runs, 1, 125) == 124
        assert runs[-1].pieces[-1].node is nodes[number]


def test_a_rare_window_goes_before_those_of_boilerplate() -> None:
    """Else a text could be rejected as too short for the sake of many that all are."""
    random = Random(13)
    boilerplate, rest = random_ids(random, 50), random_ids(random, 40)
    store = Store()
    mine = store.put([1] * 5 + boilerplate + rest, 200)
    for shift in range(32):
        for _ in range(12):
            store.put(random_ids(random, shift) + boilerplate + random_ids(random, 20), 200)
    runs = store.find([2, *boilerplate, *rest], min_tokens=80)  # `mine` has one window in there
    assert [(run.start, run.end, run.pieces[0].node) for run in runs] == [(1, 91, mine)]


# --- the tree walk from an inner node -------------------------------------------------------------------


@given(scenarios(), st.integers(-50, 50), st.data())
@settings(deadline=None, max_examples=60)
def test_walk_can_start_anywhere(scenario: tuple[Store, Ids], origin: int, data: st.DataObject) -> None:
    store, _ = scenario
    nodes = store.nodes()
    node = data.draw(st.sampled_from(nodes))
    text = text_of(data.draw(st.sampled_from([last for last in nodes if is_under(last, node)])))
    origin = min(origin, node.end)
    moved = [8] * -origin + text if origin < 0 else text[origin:]
    assert walk(node, token_bytes(moved), origin=origin) == walk(node, token_bytes(text))
    assert walk(node, token_bytes(text)).length >= len(text)
