"""The parts of an engine, joined, and the ways to run a request alone. The engine is a facade over it."""
