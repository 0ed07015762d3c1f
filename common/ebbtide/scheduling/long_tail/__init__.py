"""Decides what shortens a step's tail: forecasts of lengths, the order of starts, and lengths of drafts."""
