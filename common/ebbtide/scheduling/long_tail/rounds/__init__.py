"""Decides which prompts a step trains on, and which of them go on behind it."""
