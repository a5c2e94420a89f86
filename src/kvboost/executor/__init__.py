"""Runs requests on the parts of an engine. The engine is a facade over it."""
