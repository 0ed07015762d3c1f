"""Fits the costs of engines and trainers to measured steps."""
