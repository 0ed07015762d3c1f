"""Speaks the routes that take token ids."""
