"""What prompts have in common: the public path of `kvboost.batching.prefixes`."""

from kvboost.batching.prefixes import broadcast_kv, find_common_chunk_prefix, group_by_prefix

__all__ = ["broadcast_kv", "find_common_chunk_prefix", "group_by_prefix"]
