"""Two checkouts of the project side by side on one benchmark: what `benchmarks/ab` is made of."""
