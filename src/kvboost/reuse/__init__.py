"""What is reused for a request: plan, place, repair, store, and why."""
