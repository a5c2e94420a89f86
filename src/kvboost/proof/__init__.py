"""Is it right, and how far off is it: verification, checks of each part, error of approximate reuse."""
