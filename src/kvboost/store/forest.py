"""A prefix tree for every namespace, content indexes over them, and why text was not found in them.

A tree and the index over the trees whose text may be found together; and of what is not there: never stored,
evicted (a bounded memory of that is kept), diverged, or stored for another model. Works under the lock of the
chunk store. Knows no KV and no budget.
"""

from __future__ import annotations

from collections import OrderedDict

from kvboost.identity.namespace import Namespace
from kvboost.models import chained_hash_from_bytes
from kvboost.store import prefix_tree
from kvboost.store.content_index import ContentIndex
from kvboost.store.prefix_tree import TOKEN_BYTES, TreeNode, Walk

ROOT = Namespace(key="", family="", salt="")  # chains without a model, as the public hashes make them
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


class Forest:
    """Roots and namespaces by key, content indexes by the namespace whose prompts may find the text."""

    def __init__(self) -> None:
        self._roots: dict[str, TreeNode] = {}
        self._namespaces: dict[str, Namespace] = {}
        self._contents: dict[str, ContentIndex] = {}
        self.evicted = EvictedChunks()

    def __len__(self) -> int:
        return len(self._roots)

    def root(self, namespace: Namespace) -> TreeNode:
        """The root of a namespace's tree, made where there is none."""
        if namespace.key not in self._roots:
            self._roots[namespace.key] = TreeNode(namespace.key, b"", None)
        self._namespaces[namespace.key] = namespace
        return self._roots[namespace.key]

    def nodes(self, key: str) -> list[TreeNode]:
        """The nodes of a namespace's tree, each after its parent."""
        return prefix_tree.below(self._roots[key]) if key in self._roots else []

    def walk(self, tokens: bytes, namespace: Namespace) -> Walk | None:
        """How far the text `tokens` is known; None where nothing of the namespace is."""
        root = self._roots.get(namespace.key)
        return prefix_tree.walk(root, tokens) if root is not None else None

    def root_of_file(self, key: str, content_key: str, family: str) -> TreeNode:
        """The root that a file names, made where there is none."""
        if key in self._roots:
            return self._roots[key]
        # Whose salt it is, the file does not say: to everyone else it was never stored.
        base = content_key if content_key != key else ""
        return self.root(Namespace(key, family, f"\0{content_key}", base))

    def namespace(self, key: str) -> Namespace:
        """The namespace of a root."""
        return self._namespaces[key]

    def roots(self, family: str | None = None) -> list[TreeNode]:
        """The roots of a family, or all."""
        wanted = (key for key, each in self._namespaces.items() if family is None or each.family == family)
        return [self._roots[key] for key in wanted]

    def prune(self) -> None:
        """Drop the roots of namespaces that hold nothing."""
        for key in [key for key, root in self._roots.items() if not root.children]:
            del self._roots[key], self._namespaces[key]

    def index(self, node: TreeNode, root_key: str) -> None:
        """Make the text of a node findable by content."""
        content_key = self._namespaces[root_key].content_key
        if content_key not in self._contents:
            self._contents[content_key] = ContentIndex()
        self._contents[content_key].add(node)

    def unindex(self, node: TreeNode, root_key: str) -> None:
        """Take the text of a node out of the content index."""
        content_key = self._namespaces[root_key].content_key
        index = self._contents.get(content_key)
        if index is not None:
            index.discard(node)
            if not len(index):
                del self._contents[content_key]

    def content(self, content_key: str) -> ContentIndex | None:
        """The content index that prompts of a namespace look into."""
        return self._contents.get(content_key)

    def content_keys(self) -> list[str]:
        """The namespaces with a content index."""
        return list(self._contents)

    def why_missing(self, tokens: bytes, namespace: Namespace, walk: Walk | None) -> str:
        """Why the tokens after what `walk` found were not found."""
        whole = walk.node.end if walk is not None else 0
        parent_key = walk.node.key if walk is not None else namespace.key
        if went := self.evicted.why_start_went(tokens[whole * TOKEN_BYTES :], parent_key):
            return went
        if walk is not None and (divergence := divergence_of(tokens, walk)) is not None:
            return "diverged at token {}: expected {}, got {}".format(*divergence)
        found = walk.length if walk is not None else 0
        return OTHER_NAMESPACE if found == 0 and self._is_known_elsewhere(tokens, namespace) else NEVER_STORED

    def _is_known_elsewhere(self, tokens: bytes, namespace: Namespace) -> bool:
        """Whether another model or encoding, under the same salt, holds the start of this text."""
        return any(
            # The same text under another salt is nobody's business.
            other.family != namespace.family
            and other.salt == namespace.salt
            and prefix_tree.walk(self._roots[other.key], tokens).length > 0
            for other in self._namespaces.values()
        )


def divergence_of(tokens: bytes, walk: Walk) -> tuple[int, int, int] | None:
    """Where the text leaves the stored text nearest to it: at, expected token, got token."""
    near = walk.nearest
    if near is None or walk.length == 0 or walk.length * TOKEN_BYTES >= len(tokens):
        return None
    return walk.length, _token_at(near.tokens, walk.partial_tokens), _token_at(tokens, walk.length)


def _token_at(tokens: bytes, index: int) -> int:
    return int.from_bytes(tokens[index * TOKEN_BYTES : (index + 1) * TOKEN_BYTES], "little")


def without_tokens(reason: str) -> str:
    """The reason without what is stored: `diverged at token 7: expected ...` is `diverged at token 7`."""
    return reason.partition(": expected")[0]


def reason_kind(reason: str) -> str:
    """The reason without its particulars: `diverged at token 7: ...` is `diverged`."""
    return reason.split(":")[0].split(" at token ")[0]
