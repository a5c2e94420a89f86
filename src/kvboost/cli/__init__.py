"""The command line: reads flags, calls the engine and the benchmarks, shows what came of it.

Nothing else in the package imports it, and nothing in it loads torch or transformers before a
command runs.
"""
