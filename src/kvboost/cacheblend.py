"""Repair of the tokens that matter most: the public path of `kvboost.reuse.strategies.cacheblend`."""

from kvboost.reuse.strategies.cacheblend import CacheBlendRecompute

__all__ = ["CacheBlendRecompute"]
