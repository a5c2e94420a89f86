"""The store of chunks: the public path of `kvboost.store.manager`."""

from kvboost.models import CachedChunk
from kvboost.store.manager import KVCacheManager

__all__ = ["CachedChunk", "KVCacheManager"]
