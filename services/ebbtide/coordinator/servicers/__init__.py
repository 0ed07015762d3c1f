"""Translates the four services' messages to and from calls."""
