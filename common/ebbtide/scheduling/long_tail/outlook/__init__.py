"""Forecasts for a live run: what its rollouts have still to come, who starts first, and when its step ends."""
