"""Repair at the seams: the public path of `kvboost.reuse.strategies.selective`."""

from kvboost.reuse.strategies.selective import SelectiveRecompute

__all__ = ["SelectiveRecompute"]
