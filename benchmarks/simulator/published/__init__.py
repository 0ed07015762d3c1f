"""Compares simulations with what papers published."""
