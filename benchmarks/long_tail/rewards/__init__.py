"""Scorings beside rollouts."""
