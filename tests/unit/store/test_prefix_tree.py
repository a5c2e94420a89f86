"""The prefix tree against a brute-force model."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvboost.models import token_bytes
from kvboost.store import prefix_tree
from kvboost.store.prefix_tree import TOKEN_BYTES, TreeNode, best_child, common_tokens, insert, remove, walk

# Ids whose little-endian bytes sort otherwise than the ids do.
ids = st.sampled_from([0, 1, 2, 255, 256, 65_536, 2**32 - 1])
sequences = st.lists(ids, max_size=10)
Path = tuple[int, ...]


def common(left: Path | list[int], right: Path | list[int]) -> int:
    return sum(
        1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    )


@given(sequences, sequences)
@settings(deadline=None, max_examples=100)
def test_common_tokens_counts_whole_tokens(left: list[int], right: list[int]) -> None:
    assert common_tokens(token_bytes(left), token_bytes(right)) == common(left, right)


@given(st.sets(st.lists(ids, min_size=1, max_size=4).map(tuple), max_size=12), sequences)
@settings(deadline=None, max_examples=150)
def test_best_child_shares_most_tokens_with_the_text(children: set[Path], text: list[int]) -> None:
    root = TreeNode("root", b"", None)
    for number, child in enumerate(children):
        insert(root, token_bytes(child), str(number), None)
    found, shared = best_child(root, token_bytes(text))
    if not children or not text:
        assert (found, shared) == (None, 0)
    else:
        assert shared == max(common(child, text) for child in children)
        assert found is not None
        assert common_tokens(found.tokens, token_bytes(text)) == shared


class TreeMachine(RuleBasedStateMachine):
    """Chunks are inserted the way a store does it: never one that begins like a sibling ends."""

    @initialize()
    def start(self) -> None:
        self.root = TreeNode("root", b"", None)
        self.nodes: dict[Path, TreeNode] = {}  # by all tokens from the root on
        self.count = 0

    @rule(data=st.data(), span=st.lists(ids, min_size=1, max_size=4))
    def insert(self, data: st.DataObject, span: list[int]) -> None:
        path = data.draw(st.sampled_from([(), *sorted(self.nodes)]))
        parent = self.nodes.get(path, self.root)
        siblings = [key[len(path) :] for key, node in self.nodes.items() if node.parent is parent]
        if any(common(sibling, span) == min(len(sibling), len(span)) for sibling in siblings):
            return
        self.count += 1
        node = insert(parent, token_bytes(span), str(self.count), f"value {self.count}")
        assert node.parent is parent
        assert (node.start, node.end) == (len(path), len(path) + len(span))
        assert node.value == f"value {self.count}"
        self.nodes[path + tuple(span)] = node

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def remove_leaf(self, data: st.DataObject) -> None:
        leaves = sorted(path for path, node in self.nodes.items() if not node.children)
        path = data.draw(st.sampled_from(leaves))
        remove(self.nodes.pop(path))

    @precondition(lambda self: any(node.children for node in self.nodes.values()))
    @rule(data=st.data())
    def inner_nodes_stay(self, data: st.DataObject) -> None:
        inner = sorted(path for path, node in self.nodes.items() if node.children)
        with pytest.raises(ValueError, match="leaf"):
            remove(self.nodes[data.draw(st.sampled_from(inner))])

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def same_tokens_are_refused(self, data: st.DataObject) -> None:
        node = self.nodes[data.draw(st.sampled_from(sorted(self.nodes)))]
        assert node.parent is not None
        with pytest.raises(ValueError, match="already"):
            insert(node.parent, node.tokens, "again", None)

    @rule(data=st.data(), rest=sequences)
    def walk_finds_the_longest_known_prefix(self, data: st.DataObject, rest: list[int]) -> None:
        known = data.draw(st.sampled_from([(), *sorted(self.nodes)]))
        cut = data.draw(st.integers(0, len(known)))
        text = [*known[:cut], *rest]
        found = walk(self.root, token_bytes(text))
        assert found.length == max((common(path, text) for path in self.nodes), default=0)
        spelled = b"".join(node.tokens for node in found.path)
        if found.partial is not None:
            assert 0 < found.partial_tokens < len(found.partial.tokens) // TOKEN_BYTES
            assert found.partial.parent is found.node
            spelled += found.partial.tokens[: found.partial_tokens * TOKEN_BYTES]
        else:
            assert found.partial_tokens == 0
        assert spelled == token_bytes(text[: found.length])
        assert all(
            node.parent is before for before, node in zip([self.root, *found.path], found.path, strict=False)
        )
        if found.nearest is not None:
            assert found.nearest.parent is found.node

    @invariant()
    def children_are_sorted(self) -> None:
        for node in [self.root, *self.nodes.values()]:
            assert node.child_tokens == sorted(node.child_tokens)
            assert [child.tokens for child in node.children] == node.child_tokens
            assert node.longest_child >= max((len(tokens) for tokens in node.child_tokens), default=0)


TreeMachine.TestCase.settings = settings(deadline=None, max_examples=40, stateful_step_count=30)
TestTreeMachine = TreeMachine.TestCase


def test_a_removed_node_cannot_be_removed_again() -> None:
    root = TreeNode("root", b"", None)
    node = insert(root, token_bytes([1, 2]), "a", None)
    remove(node)
    with pytest.raises(ValueError, match="not in the tree"):
        remove(node)
    with pytest.raises(ValueError, match="leaf"):
        remove(root)


def test_nearest_names_the_child_even_if_nothing_agrees() -> None:
    root = TreeNode("root", b"", None)
    node = insert(root, token_bytes([1, 2]), "a", None)
    found = walk(root, token_bytes([7, 8]))
    assert (found.length, found.partial, found.nearest) == (0, None, node)
    assert walk(root, b"").nearest is None


def test_look_up_does_not_touch_most_children(monkeypatch: pytest.MonkeyPatch) -> None:
    root = TreeNode("root", b"", None)
    for number in range(5_000):
        insert(root, token_bytes([number * 7, number]), str(number), None)
    compared = 0

    def counting(left: bytes, right: bytes) -> int:
        nonlocal compared
        compared += 1
        return common_tokens(left, right)

    monkeypatch.setattr(prefix_tree, "common_tokens", counting)
    assert walk(root, token_bytes([7 * 4_321, 4_321, 5])).length == 2
    assert compared <= 4
