"""Measures a fleet of a thousand workers: callbacks and decisions of the coordinator, its cost, memory and takeover."""
