"""Running a model over a cache: prefill, decode, sparse forwards, packed steps. Knows no store."""
