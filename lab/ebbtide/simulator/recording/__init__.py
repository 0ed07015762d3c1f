"""Keeps what a live run did (lengths, workers, steps), and simulates it on this fleet or another."""
