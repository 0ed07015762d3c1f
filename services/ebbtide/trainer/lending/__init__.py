"""Lends the devices of a trainer of several ranks by one decision, and moves its own memory out of the engines' way."""
