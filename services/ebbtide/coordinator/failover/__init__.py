"""Taking over: the lease of the fleet, runs read back, and stores that forgot."""
