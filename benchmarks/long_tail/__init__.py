"""Measures what shortens the long tail of a step, beside published rules."""
