"""The checks that `verify` runs on an engine, one part at a time; `plan` says which, and in which order."""
