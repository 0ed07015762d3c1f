"""Simulates windows beside rivals and an oracle, over models, traces and assumptions."""
