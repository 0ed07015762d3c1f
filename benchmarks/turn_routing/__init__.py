"""Compares how turns of sessions are routed, on a modelled fleet."""
