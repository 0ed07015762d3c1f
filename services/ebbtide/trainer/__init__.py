"""Trains runs: turns their rollouts into policy versions."""
