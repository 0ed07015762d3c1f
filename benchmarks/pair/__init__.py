"""Two real engines that share one small machine: one serves replayed users, the other generates a run's rollouts."""
