"""Typed wrappers of the scripts, one per topic."""
