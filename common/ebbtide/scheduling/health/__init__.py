"""Decides which workers and coordinators can be trusted: silence, stalled tokens, flapping, leadership."""
