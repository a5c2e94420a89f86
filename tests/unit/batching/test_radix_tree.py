"""The radix tree: what is evicted, what is forgotten, and in how many pieces new text lies."""

from __future__ import annotations

import random

import numpy as np

from kvboost.batching.radix_tree import Node, RadixTree
from kvboost.batching.slot_pool import SlotPool
from tests.tiny_models import random_ids


def test_the_least_recently_used_is_evicted_first() -> None:
    tree = RadixTree(SlotPool(0, 100))
    for seed in (1, 2, 3):
        node, there = tree.enter("a", np.array(random_ids(30, seed)))
        assert there == 0
        node.segment.length = 30
        tree.leave(node)
    assert tree.find("a", np.array(random_ids(30, 1))).at == 30
    node, _ = tree.enter("a", np.array(random_ids(30, 1)))  # used again
    tree.leave(node)
    tree.take(30)
    found = [tree.find("a", np.array(random_ids(30, seed))).at for seed in (1, 2, 3)]
    assert found == [30, 0, 30]


def test_namespaces_without_text_are_forgotten() -> None:
    """Clients choose salts: a thousand of them leave nothing behind but the text that fits."""
    tree = RadixTree(SlotPool(0, 400))
    for number in range(1_000):
        node, _ = tree.enter(f"salt {number}", np.arange(40))
        for each in node.path:
            each.segment.length = each.segment.capacity
        tree.leave(node)
        assert len(tree._roots) <= 10
    assert tree.tokens == 400
    empty, at = tree.enter("nothing", np.arange(0))
    assert (len(empty.tokens), at) == (0, 0)
    tree.leave(empty)
    assert "nothing" not in tree._roots
    tree.clear()
    assert tree.pool._ranges == [(0, 400)]


def test_the_last_text_of_a_namespace_makes_room_for_its_next() -> None:
    tree = RadixTree(SlotPool(0, 50))
    for seed in (0, 100, 200):
        node, _ = tree.enter("a", np.arange(40) + seed)
        for each in node.path:
            each.segment.length = each.segment.capacity
        tree.leave(node)
        assert tree.find("a", np.arange(40) + seed).at == 40


def test_new_text_lies_in_few_pieces() -> None:
    """Prompts of all lengths come and go for long, and paths do not fall to pieces."""
    draw = random.Random(1)
    make = np.random.default_rng(1)
    tree = RadixTree(SlotPool(0, 8_000))
    texts = [make.integers(0, 9_999, draw.randint(100, 400)) for _ in range(10)]
    living: list[Node] = []
    pieces = []
    for number in range(1_500):
        tokens = make.integers(0, 9_999, draw.randint(5, 400))
        if draw.random() < 0.6:
            tokens = np.concatenate([draw.choice(texts), tokens[:100]])
        while len(living) >= 8 or (living and _lacks_room(tree, tokens)):
            tree.leave(living.pop(draw.randrange(len(living))))
        node, _ = tree.enter("a", tokens)
        for each in node.path:
            each.segment.length = each.segment.capacity
        living.append(node)
        if number > 1_000:
            pieces.append(len(node.path))
    assert np.mean(pieces) < 6, "26 without"
    assert max(pieces) <= 12


def _lacks_room(tree: RadixTree, tokens: np.ndarray) -> bool:
    needed, there = tree.room_for("a", tokens, 0)
    return needed > there
