"""Compares how turns of sessions are routed, on two real engines under a live coordinator."""
