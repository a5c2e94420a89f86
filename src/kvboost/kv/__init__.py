"""KV as tensors: the arena, rotation of keys, the stored form of a chunk. Knows no tokens and no store."""
