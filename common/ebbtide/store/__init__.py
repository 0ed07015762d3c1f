"""Talks to Redis, as the only package: names keys, and runs scripts (`lua/`) through typed wrappers."""
