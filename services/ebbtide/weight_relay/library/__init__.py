"""Keeps the versions that a relay holds, on disk and in memory, and drops them."""
