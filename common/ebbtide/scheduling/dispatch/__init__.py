"""Decides the order of queued rollouts, their workers and versions, and their moves."""
