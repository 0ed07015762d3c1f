"""Holds policies as published, to compare with: small classes beside each other that see the coordinator's state."""
