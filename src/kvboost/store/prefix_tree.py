"""The prefix tree: which token sequences are known, chunk by chunk.

A node is a chunk of tokens under its parent; the root of each namespace is empty. Children are
kept sorted by their token bytes, so the child that agrees longest with a text is a neighbour of
the place where the text would be inserted: look-up costs the same with three or with a hundred
thousand continuations. Knows tokens and keys only, no KV, no budget and no locks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np

TOKEN_BYTES = 4


class TreeNode:
    """Tokens `[start, end)` of a text under the tokens of all its ancestors."""

    __slots__ = (
        "child_tokens",
        "children",
        "end",
        "key",
        "longest_child",
        "parent",
        "start",
        "tokens",
        "value",
    )

    def __init__(self, key: str, tokens: bytes, parent: TreeNode | None, value: Any = None) -> None:
        self.key = key
        self.tokens = tokens
        self.parent = parent
        self.start: int = parent.end if parent is not None else 0
        self.end: int = self.start + len(tokens) // TOKEN_BYTES
        self.children: list[TreeNode] = []
        self.child_tokens: list[bytes] = []
        self.longest_child = 0
        self.value = value

    @property
    def is_root(self) -> bool:
        return self.parent is None


@dataclass(frozen=True)
class Walk:
    """How far a text is known: whole nodes, then `partial_tokens` tokens into `partial`.

    `nearest` is the child that agrees longest beyond the whole nodes, even by zero tokens.
    """

    root: TreeNode
    path: tuple[TreeNode, ...]
    partial: TreeNode | None
    partial_tokens: int
    nearest: TreeNode | None

    @property
    def node(self) -> TreeNode:
        return self.path[-1] if self.path else self.root

    @property
    def length(self) -> int:
        return self.node.end + self.partial_tokens


def common_tokens(left: bytes, right: bytes) -> int:
    """Number of leading tokens that two token byte strings share."""
    size = min(len(left), len(right))
    if left[:size] == right[:size]:
        return size // TOKEN_BYTES
    a = np.frombuffer(left, dtype="<u4", count=size // TOKEN_BYTES)
    b = np.frombuffer(right, dtype="<u4", count=size // TOKEN_BYTES)
    return int(np.argmax(a != b))


def walk(start: TreeNode, tokens: bytes, *, origin: int = 0) -> Walk:
    """Follow `tokens` from `start` as far as any chain of nodes knows them. Changes nothing.

    `tokens` are those of the whole text, from its first token on; with `origin` the first of them
    stands for the text's token of that number, which may lie before the text (below zero).
    """
    best: Walk | None = None
    waiting: list[tuple[TreeNode, list[TreeNode]]] = [(start, [])]
    while waiting:
        node, path = waiting.pop()
        while True:
            first = (node.end - origin) * TOKEN_BYTES
            rest = tokens[first : first + node.longest_child]
            if len(node.children) == 1 and rest == node.child_tokens[0]:  # the usual case, of long chains
                node = node.children[0]
                path.append(node)
                continue
            whole = whole_children(node, rest)
            near, common = best_child(node, rest)
            if len(whole) != 1 or common * TOKEN_BYTES > len(whole[0].tokens):
                break
            node = whole[0]
            path.append(node)
        way = Walk(start, tuple(path), near if common else None, common, near)
        if best is None or way.length >= best.length:  # whole chunks rather than a part of another
            best = way
        waiting += [(child, [*path, child]) for child in whole]  # the longest is followed last: it wins
    assert best is not None
    return best


def whole_children(node: TreeNode, tokens: bytes) -> list[TreeNode]:
    """The children whose tokens all stand at the start of `tokens`, the longest first."""
    found: list[TreeNode] = []
    while tokens and node.children:
        place = bisect_right(node.child_tokens, tokens) - 1
        if place < 0:
            break
        candidate = node.child_tokens[place]
        common = common_tokens(candidate, tokens) * TOKEN_BYTES
        if common == len(candidate):
            found.append(node.children[place])
            common -= TOKEN_BYTES
        tokens = tokens[:common]
    return found


def best_child(node: TreeNode, tokens: bytes) -> tuple[TreeNode | None, int]:
    """The child sharing most leading tokens with `tokens`, and how many it shares."""
    if not node.children or not tokens:
        return None, 0
    place = bisect_left(node.child_tokens, tokens)
    best: TreeNode | None = None
    most = -1
    for index in (place, place - 1):
        if 0 <= index < len(node.children):
            common = common_tokens(node.child_tokens[index], tokens)
            if common > most:
                best, most = node.children[index], common
    return best, most


def insert(parent: TreeNode, tokens: bytes, key: str, value: Any) -> TreeNode:
    """Add a child with these tokens; there must be none with the same ones."""
    place = bisect_left(parent.child_tokens, tokens)
    if place < len(parent.children) and parent.child_tokens[place] == tokens:
        raise ValueError("the tokens are in the tree already")
    node = TreeNode(key, tokens, parent, value)
    parent.child_tokens.insert(place, tokens)
    parent.children.insert(place, node)
    parent.longest_child = max(parent.longest_child, len(tokens))
    return node


def remove(node: TreeNode) -> None:
    """Take a leaf out of the tree."""
    if node.parent is None or node.children:
        raise ValueError("only a leaf can be removed")
    siblings = node.parent
    place = bisect_left(siblings.child_tokens, node.tokens)
    if place >= len(siblings.children) or siblings.children[place] is not node:
        raise ValueError("the node is not in the tree")
    del siblings.child_tokens[place]
    del siblings.children[place]
    if not siblings.children:
        siblings.longest_child = 0


def below(root: TreeNode) -> list[TreeNode]:
    """All nodes under `root`, each after its parent."""
    found: list[TreeNode] = []
    waiting = list(root.children)
    while waiting:
        node = waiting.pop()
        found.append(node)
        waiting.extend(node.children)
    return found
