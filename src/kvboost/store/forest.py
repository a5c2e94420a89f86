"""A prefix tree for every namespace, and the content index over the trees whose text may be found together.

Works under the lock of the chunk store. Knows no KV and no budget.
"""

from __future__ import annotations

from kvboost.identity.namespace import Namespace
from kvboost.store.content_index import ContentIndex
from kvboost.store.miss_reasons import EvictedChunks, why_missing
from kvboost.store.prefix_tree import TreeNode, Walk

ROOT = Namespace(key="", family="", salt="")  # chains without a model, as the public hashes make them


class Forest:
    """Roots and namespaces by key, content indexes by the namespace whose prompts may find the text."""

    def __init__(self) -> None:
        self._roots: dict[str, TreeNode] = {}
        self._namespaces: dict[str, Namespace] = {}
        self._contents: dict[str, ContentIndex] = {}

    def __len__(self) -> int:
        return len(self._roots)

    def root(self, namespace: Namespace) -> TreeNode:
        """The root of a namespace's tree, made where there is none."""
        if namespace.key not in self._roots:
            self._roots[namespace.key] = TreeNode(namespace.key, b"", None)
        self._namespaces[namespace.key] = namespace
        return self._roots[namespace.key]

    def get(self, key: str) -> TreeNode | None:
        """The root of the namespace with this key, or None."""
        return self._roots.get(key)

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

    def why_missing(
        self, tokens: bytes, namespace: Namespace, walk: Walk | None, evicted: EvictedChunks
    ) -> str:
        """Why the tokens after what `walk` found were not found."""
        return why_missing(tokens, namespace, walk, evicted, self._roots, self._namespaces)
