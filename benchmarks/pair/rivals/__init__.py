"""Runs rivals as programs in the guard's place."""
