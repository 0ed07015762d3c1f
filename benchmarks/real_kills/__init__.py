"""Level (c) of the migration benchmark: real engines on the real services, killed at random moments again and again,
and each token compared with that of a run that nothing disturbed. See `level.run_level`.
"""
