"""Trains an agent that speaks to a gateway, knows nothing of training, and calls a tool."""
