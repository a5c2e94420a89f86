"""The parts of one engine: its model as it is now, its cache, and what finds, places and stores KV."""
