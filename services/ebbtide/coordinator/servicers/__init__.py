"""Translates the three services' messages to and from calls."""
