"""Learns how long responses will be and how fast workers generate, and forecasts by that what rollouts still make."""
