"""Runs a scenario in virtual time: the coordinator's own state and decisions over simulated workers and trainers."""
