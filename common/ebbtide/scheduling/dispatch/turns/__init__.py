"""Decides where an episode's next turn runs."""
