"""Simulates a fleet in virtual time under the decisions that run live."""
