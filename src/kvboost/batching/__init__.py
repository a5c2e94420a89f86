"""Many requests at once: batches that are given, and the running batch that requests join and leave."""
