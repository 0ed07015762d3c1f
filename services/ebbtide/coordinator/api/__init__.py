"""What clients ask of the coordinator: runs, rollouts, leases, and the checks of their requests."""
