"""Knows the runs that requests may belong to, and what serving them takes."""
