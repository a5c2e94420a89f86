"""Long runs of whole servers; `make soak` runs them."""
