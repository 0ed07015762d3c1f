"""Measures what moves of running rollouts gain on two real engines under a live coordinator."""
