"""Chunks on disk: the public path of `kvboost.disk.tier`."""

from kvboost.disk.tier import DiskTier

__all__ = ["DiskTier"]
