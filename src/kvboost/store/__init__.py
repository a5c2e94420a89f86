"""The chunks that are known: found, counted, evicted. Knows no model and no files."""
