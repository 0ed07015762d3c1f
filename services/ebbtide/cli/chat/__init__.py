"""Lets people talk to a run's policy through a gateway."""
