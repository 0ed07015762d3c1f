"""Runs the environments of runs, submits their turns as rollouts, and completes their episodes.

The driver stores nothing: the run's spec, its seed and the order of announced versions determine every id and body that
it submits. A restarted driver submits the same again, and the coordinator answers with the known outcomes.
"""
