"""Measures an engine or a trainer, and fits the profile that simulations use."""
