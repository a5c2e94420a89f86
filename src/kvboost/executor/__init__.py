"""The parts of an engine, and the executors that run requests on them. The engine is a facade over it."""
