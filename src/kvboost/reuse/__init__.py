"""Reuse for one request: plan it, place it, repair it, store what was computed, and explain it."""
