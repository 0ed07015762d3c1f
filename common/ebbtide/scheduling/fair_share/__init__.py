"""Shares the fleet: what each run is due, what it got, and which run each worker serves."""
