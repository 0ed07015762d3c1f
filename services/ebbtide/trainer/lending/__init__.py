"""Decides when a trainer's devices are lent, and lends those of all its ranks by one decision."""
