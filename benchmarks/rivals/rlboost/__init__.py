"""Decides as RLBoost does, as published: placement, moves, and the window in which a trainer's devices generate."""
