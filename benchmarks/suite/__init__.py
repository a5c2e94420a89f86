"""The benchmarks that `kvboost bench` has only in a checkout: each measures, and returns one record.

They know the engine and transformers, and share records, texts and times with those of `kvboost.bench`; how a
record is shown is the business of `commands`.
"""
