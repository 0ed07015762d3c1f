"""Decides what clients' keys may use of a run."""
