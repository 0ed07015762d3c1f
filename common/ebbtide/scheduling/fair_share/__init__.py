"""Decides what share of the fleet each run is due, and which run each worker serves."""
