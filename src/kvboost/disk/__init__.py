"""The disk tier and what stands behind it: slots, index, records, trust, and snapshots. Knows no model."""
