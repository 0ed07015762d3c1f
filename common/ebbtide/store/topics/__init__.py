"""Wraps the scripts in typed calls, one class per topic."""
