"""Submits the groups of runs whose steps train on the groups that are whole first."""
