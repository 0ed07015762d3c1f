"""Seer's settings, simulated: policies beside each other, and beside what Seer published."""
