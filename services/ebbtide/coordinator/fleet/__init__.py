"""Keeps the attached workers: their reports, their health, and the requests to them."""
