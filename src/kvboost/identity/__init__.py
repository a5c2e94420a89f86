"""Which model this is right now: its state, checksums of its weights, the namespace of its KV."""
