"""Models and tokenizers by name. Knows no cache."""
