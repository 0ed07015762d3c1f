"""Decides on a run's steps: which are open, what becomes of groups, and which run a trainer claims."""
