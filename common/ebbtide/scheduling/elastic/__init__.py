"""Decides when a trainer's devices generate rollouts, and when the trainer gets them back."""
