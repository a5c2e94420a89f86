"""What measures kvboost and is not installed: more benchmarks, the peers, comparing revisions, results."""
