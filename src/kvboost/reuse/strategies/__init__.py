"""Repair strategies: which of the reused tokens are computed again. One per file."""
