"""Decides what a borrower may do beside served requests: the guard's own policy, and others to compare."""
