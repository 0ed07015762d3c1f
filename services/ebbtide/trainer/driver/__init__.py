"""Keeps the former place of the episode driver."""
