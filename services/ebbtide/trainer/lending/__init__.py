"""Decides with a live coordinator when a trainer's device is lent, and carries it out."""
