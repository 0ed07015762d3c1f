"""Draws what happens in a scenario from its seed: machines' lives, episodes' turns, served requests."""
