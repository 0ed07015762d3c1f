"""Runs the verifiers of agents' sessions, and posts their verdicts."""
