"""Benchmarks that a user can repeat: each measures, and returns one record that goes into JSON.

They know the engine and transformers; how a record is shown is the command line's business. Only those of
`kvboost bench prefix`, `rag` and `serve` are here; all others are in `benchmarks/` of the repository.
"""
