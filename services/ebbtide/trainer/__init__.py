"""The trainer, and beside it the episode driver: they turn a run's rollouts into policy versions."""
