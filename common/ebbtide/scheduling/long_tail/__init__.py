"""Decides what shortens a step's tail: forecasts of lengths and the order of starts."""
