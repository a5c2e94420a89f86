"""Where texts are cut: the public path of `kvboost.store.chunking`."""

from kvboost.choices import ChunkStrategy
from kvboost.store.chunking import ChunkRegistry

__all__ = ["ChunkRegistry", "ChunkStrategy"]
