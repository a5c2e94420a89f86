"""Adapters for other programs. Nothing here is imported by kvboost itself."""
