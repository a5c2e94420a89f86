"""A radix tree of the prompts whose KV lies in an arena, per namespace.

A prompt is a path in the tree. Prompts that share a prefix share its nodes, also while these are still being
computed; a node is split where a new prompt leaves it. What no sequence uses stays until its slots are
needed, and is evicted in LRU order. Knows slots and tokens, neither models nor stores.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvboost.batching.prefixes import MIN_SHARED_TOKENS, common_tokens
from kvboost.batching.slot_pool import SlotPool
from kvboost.run.packed_step import Segment

_MOST_RANGES = 4  # for a new path, if possible: each range is a call of attention per layer


class Node:
    """Tokens `[n]` behind those of `parent`, and the segment of their KV, which may not be filled yet.

    A private one belongs to one sequence: no other finds it, and it goes with its sequence.
    """

    def __init__(
        self, tokens: np.ndarray, segment: Segment, parent: Node | None, *, is_private: bool = False
    ) -> None:
        self.tokens = tokens
        self.segment = segment
        self.parent = parent
        self.is_private = is_private
        self.children: list[Node] = []
        self.namespace_key = ""  # set on roots only
        self.users = 0  # sequences whose path goes through it
        self.last_used = 0

    @property
    def first_token(self) -> int:
        return int(self.tokens[0]) if len(self.tokens) else -1

    @property
    def is_filled(self) -> bool:
        return self.segment.is_filled

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.segment.position + self.segment.capacity

    @property
    def path(self) -> list[Node]:
        """All nodes from the root, which has no tokens and is left out, to this one."""
        path: list[Node] = []
        node: Node | None = self
        while node is not None and len(node.tokens):
            path.append(node)
            node = node.parent
        return path[::-1]

    def subtree(self) -> Iterator[Node]:
        """This node and all below it, parents first."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children


@dataclass(frozen=True)
class Found:
    """The node where a text leaves the tree, after `common` of the node's tokens and `at` of its own."""

    node: Node
    common: int
    at: int


class RadixTree:
    """The tree of every namespace, over one pool of slots."""

    def __init__(self, pool: SlotPool) -> None:
        self.pool = pool
        self._roots: dict[str, Node] = {}
        self._clock = 0

    def find(self, namespace_key: str, tokens: np.ndarray) -> Found:
        """The longest prefix of `tokens` `[n]` in the tree. Changes nothing."""
        node = self._roots.get(namespace_key) or _root(namespace_key)
        at = 0
        while at < len(tokens):
            best, common = None, 0
            for child in node.children:
                if child.is_private or child.first_token != tokens[at]:
                    continue
                shared = common_tokens(child.tokens, tokens[at:])
                # A short node costs more in every later step than it saves once.
                if shared > common and shared >= min(MIN_SHARED_TOKENS, len(child.tokens)):
                    best, common = child, shared
            if best is None:
                break
            at += common
            if common < len(best.tokens):
                return Found(best, common, at)
            node = best
        return Found(node, len(node.tokens), at)

    def room_for(
        self, namespace_key: str, tokens: np.ndarray, reserved: int, shared: int | None = None
    ) -> tuple[int, int]:
        """Slots that a path for `tokens` `[n]` needs, and how many could be taken beside `reserved` ones.

        It is private behind the first `shared` of them (None = none of it is).
        """
        found = self.find(namespace_key, tokens[:shared])
        own = {id(node) for node in found.node.path}
        idle = sum(
            len(node.tokens)
            for root in self._roots.values()
            for node in root.subtree()
            if not node.users and id(node) not in own
        )
        if not found.node.users:  # what is behind the split can be evicted
            idle += len(found.node.tokens) - found.common
        return len(tokens) - found.at, self.pool.free + idle - reserved

    def enter(self, namespace_key: str, tokens: np.ndarray) -> tuple[Node, int]:
        """The path of `tokens` `[n]`, made where it is missing, with one more user.

        Returns its last node, and how many of the tokens were there. New nodes are not filled; raises
        ValueError where there is no room.
        """
        found = self.find(namespace_key, tokens)
        node = found.node
        if node.parent is not None and found.common < len(node.tokens):
            node = self._split(node, found.common)
        for each in node.path:
            each.users += 1  # so that it is not evicted to make room
        try:
            ranges = self.take(len(tokens) - found.at)
        except ValueError:
            for each in node.path:
                each.users -= 1
            raise
        if node.parent is None and ranges:
            self._roots[namespace_key] = node  # whose last text may just have been evicted
        node = self._add(node, tokens[found.at :], ranges)
        self._touch(node)
        return node, found.at

    def enter_private(self, node: Node, tokens: np.ndarray) -> Node:
        """Private nodes for `tokens` `[n]` behind the path of `node`, which has been entered.

        Returns the last of them; raises ValueError where there is no room.
        """
        ranges = self.take(len(tokens))
        if node.parent is None and ranges:
            self._roots[node.namespace_key] = node  # whose last text may just have been evicted
        return self._add(node, tokens, ranges, is_private=True)

    @staticmethod
    def _add(
        node: Node, tokens: np.ndarray, ranges: list[tuple[int, int]], *, is_private: bool = False
    ) -> Node:
        """Nodes of one user for `tokens` `[n]` behind `node`, in the slots of `ranges`; returns the last."""
        at = 0
        for start, end in ranges:
            segment = Segment(start, end - start, tuple(each.segment for each in node.path))
            child = Node(tokens[at : at + end - start].copy(), segment, node, is_private=is_private)
            child.users = 1
            node.children.append(child)
            node, at = child, at + end - start
        return node

    def leave(self, node: Node) -> None:
        """Remove a user of a path; slots that are not filled and that no sequence waits for become free."""
        self._touch(node)
        for each in node.path:
            each.users -= 1
        path = node.path
        if self._forget_if_cleared(path):
            return
        path = self._without_private(path)
        for each in path:
            if not each.users and not each.is_filled:
                self._cut_back(each)
                return

    def release(self, nodes: list[Node]) -> Node:
        """Remove a user of the last `nodes` of a path, all of them filled; returns the node before them."""
        before = nodes[0].parent
        assert before is not None
        self._touch(nodes[-1])
        for node in nodes:
            node.users -= 1
        if not self._forget_if_cleared(nodes[-1].path):
            self._without_private(nodes)
        return before

    def _without_private(self, path: list[Node]) -> list[Node]:
        """Remove the private nodes of a path that its sequence has left; returns the others."""
        for node in path[::-1]:
            if node.is_private:
                self._remove(node)
        return [node for node in path if not node.is_private]

    def take(self, count: int) -> list[tuple[int, int]]:
        """Take free slots, in few ranges; evicts where that is needed."""
        if not self.pool.has_room(count, _MOST_RANGES):
            self._evict(count)
        return self.pool.take(count)

    def _evict(self, count: int) -> None:
        """Evict idle nodes in LRU order until `count` slots are free in few ranges.

        Where evicting all of them does not give few ranges, many will do, at the cost of slower steps.
        """
        order = itertools.count()
        idle = [
            (node.last_used, next(order), node)
            for root in self._roots.values()
            for node in root.subtree()
            if _is_evictable(node)
        ]
        heapq.heapify(idle)
        while idle and not self.pool.has_room(count, _MOST_RANGES):
            node = heapq.heappop(idle)[2]
            self._remove(node)
            parent = node.parent
            assert parent is not None
            if _is_evictable(parent):
                heapq.heappush(idle, (parent.last_used, next(order), parent))
        if self.pool.free < count:
            raise ValueError(f"{count} slots are wanted, {self.pool.free} are free")

    def clear(self) -> None:
        """Forget everything. Sequences keep the nodes they use, and no other finds them."""
        roots, self._roots = self._roots, {}
        for root in roots.values():
            for node in [*root.subtree()][::-1]:
                if node.parent is not None and not node.users:
                    self._remove(node)

    @property
    def tokens(self) -> int:
        """Tokens in the trees."""
        return sum(len(node.tokens) for root in self._roots.values() for node in root.subtree())

    def _split(self, node: Node, at: int) -> Node:
        """Split a node in two; returns the upper part. Segments behind it see both parts from now on."""
        old = node.segment
        upper = Node(node.tokens[:at].copy(), Segment(old.start, at, old.before), node.parent)
        upper.segment.length = min(old.length, at)
        upper.users, upper.last_used = node.users, node.last_used
        lower = Segment(old.start + at, old.capacity - at, (*old.before, upper.segment))
        lower.length = old.length - upper.segment.length
        assert node.parent is not None
        node.parent.children[node.parent.children.index(node)] = upper
        upper.children = [node]
        node.parent, node.tokens, node.segment = upper, node.tokens[at:].copy(), lower
        for each in node.subtree():
            if each is not node:
                assert each.parent is not None
                each.segment.before = (*each.parent.segment.before, each.parent.segment)
        return upper

    def _cut_back(self, node: Node) -> None:
        """Keep the filled part of a node. Nothing below it can be filled."""
        for each in [*node.subtree()][:0:-1]:
            self._remove(each)
        filled = node.segment.length
        if not filled:
            self._remove(node)
            return
        self.pool.give(node.segment.start + filled, node.segment.start + node.segment.capacity)
        node.segment.capacity = filled
        node.tokens = node.tokens[:filled]

    def _remove(self, node: Node) -> None:
        assert node.parent is not None
        parent = node.parent
        parent.children.remove(node)
        if parent.parent is None and not parent.children and self._is_known(parent):
            del self._roots[parent.namespace_key]
        self.pool.give(node.segment.start, node.segment.start + node.segment.capacity)

    def _forget_if_cleared(self, path: list[Node]) -> bool:
        """Free the unused nodes of a path that `clear` has taken out of the tree; False where it was not."""
        if not path or self._is_known(path[0].parent):
            return False
        for node in path[::-1]:
            if not node.users:
                self._remove(node)
        return True

    def _is_known(self, root: Node | None) -> bool:
        """Whether a root is still part of the tree."""
        return root is not None and self._roots.get(root.namespace_key) is root

    def _touch(self, node: Node) -> None:
        self._clock += 1
        for each in node.path:
            each.last_used = self._clock


def _root(namespace_key: str) -> Node:
    root = Node(np.zeros(0, dtype=np.int64), Segment(0, 0), None)
    root.namespace_key = namespace_key
    return root


def _is_evictable(node: Node) -> bool:
    return node.parent is not None and not node.users and not node.children
