"""What share of the fleet each run is due, what it got, and which run each worker serves."""
