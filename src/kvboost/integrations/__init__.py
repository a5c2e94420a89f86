"""Adapters for other programs, one module each. Nothing here is imported by kvboost itself."""
