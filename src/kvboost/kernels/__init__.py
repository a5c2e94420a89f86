"""How attention and linear layers are computed during our forwards. Knows tensors and masks, no cache."""
