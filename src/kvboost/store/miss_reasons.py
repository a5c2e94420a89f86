"""Why tokens were not found: never stored, evicted, diverged, or stored for another model.

Keeps a bounded memory of what was evicted. Knows the prefix tree, no KV and no budget.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

from kvboost.identity.namespace import Namespace
from kvboost.models import chained_hash_from_bytes
from kvboost.store import prefix_tree
from kvboost.store.prefix_tree import TOKEN_BYTES, TreeNode, Walk

NEVER_STORED = "never stored"
EVICTED = "evicted"
OTHER_NAMESPACE = "other namespace"
_MAX_REMEMBERED = 65_536


class EvictedChunks:
    """The keys of chunks that went last and why, by the chunk that they followed."""

    def __init__(self) -> None:
        self._keys: OrderedDict[str, tuple[str, int]] = OrderedDict()  # key -> (parent key, bytes)
        self._reasons: dict[str, str] = {}  # of those that were not just evicted
        self._sizes: dict[str, dict[int, int]] = {}  # parent key -> {bytes: how many}

    def remember(self, key: str, parent_key: str, size: int, reason: str = EVICTED) -> None:
        """Note that the chunk `key` of `size` token bytes under `parent_key` went."""
        self.forget(key)
        if reason != EVICTED:
            self._reasons[key] = reason
        self._keys[key] = (parent_key, size)
        sizes = self._sizes.setdefault(parent_key, {})
        sizes[size] = sizes.get(size, 0) + 1
        if len(self._keys) > _MAX_REMEMBERED:
            self.forget(next(iter(self._keys)))

    def forget(self, key: str) -> None:
        """It is stored again, or was never evicted."""
        if key not in self._keys:
            return
        parent_key, size = self._keys.pop(key)
        self._reasons.pop(key, None)
        sizes = self._sizes[parent_key]
        sizes[size] -= 1
        if not sizes[size]:
            del sizes[size]
        if not sizes:
            del self._sizes[parent_key]

    def why_start_went(self, rest: bytes, parent_key: str) -> str:
        """Why a chunk that begins `rest` under `parent_key` is no longer there; "" where there was none."""
        for size in self._sizes.get(parent_key, ()):
            if size <= len(rest):
                key = chained_hash_from_bytes(rest[:size], parent_key)
                if key in self._keys:
                    return self._reasons.get(key, EVICTED)
        return ""

    def clear(self) -> None:
        self._keys.clear()
        self._reasons.clear()
        self._sizes.clear()


def why_missing(
    tokens: bytes,
    namespace: Namespace,
    walk: Walk | None,
    evicted: EvictedChunks,
    roots: Mapping[str, TreeNode],
    namespaces: Mapping[str, Namespace],
) -> str:
    """Why the tokens after what `walk` found were not found."""
    whole = walk.node.end if walk is not None else 0
    parent_key = walk.node.key if walk is not None else namespace.key
    if went := evicted.why_start_went(tokens[whole * TOKEN_BYTES :], parent_key):
        return went
    if walk is not None and (divergence := divergence_of(tokens, walk)) is not None:
        return "diverged at token {}: expected {}, got {}".format(*divergence)
    found = walk.length if walk is not None else 0
    if found == 0 and _known_elsewhere(tokens, namespace, roots, namespaces.values()):
        return OTHER_NAMESPACE
    return NEVER_STORED


def divergence_of(tokens: bytes, walk: Walk) -> tuple[int, int, int] | None:
    """Where the text leaves the stored text nearest to it: at, expected token, got token."""
    near = walk.nearest
    if near is None or walk.length == 0 or walk.length * TOKEN_BYTES >= len(tokens):
        return None
    return walk.length, _token_at(near.tokens, walk.partial_tokens), _token_at(tokens, walk.length)


def _token_at(tokens: bytes, index: int) -> int:
    return int.from_bytes(tokens[index * TOKEN_BYTES : (index + 1) * TOKEN_BYTES], "little")


def _known_elsewhere(
    tokens: bytes, namespace: Namespace, roots: Mapping[str, TreeNode], others: Iterable[Namespace]
) -> bool:
    """Whether another model or encoding, under the same salt, holds the start of this text."""
    return any(
        # The same text under another salt is nobody's business.
        other.family != namespace.family
        and other.salt == namespace.salt
        and prefix_tree.walk(roots[other.key], tokens).length > 0
        for other in others
    )


def without_tokens(reason: str) -> str:
    """The reason without what is stored: `diverged at token 7: expected ...` is `diverged at token 7`."""
    return reason.partition(": expected")[0]


def reason_kind(reason: str) -> str:
    """The reason without its particulars: `diverged at token 7: ...` is `diverged`."""
    return reason.split(":")[0].split(" at token ")[0]
