"""Keeps what the guard knows of served traffic: its events, its figures, and the SLO."""
