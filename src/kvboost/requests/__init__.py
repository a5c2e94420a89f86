"""From a caller's arguments to a checked request, and back to text. Knows no store."""
