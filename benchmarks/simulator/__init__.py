"""Judges the simulator: against real engines on this machine, against published points, and by its speed."""
