"""Judges the simulator: against real engines on this machine, against published points, by its speed, and by whether it
takes the decisions that were taken live.
"""
