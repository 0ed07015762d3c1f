"""Decides which queued rollout goes to which worker, in which order, and which one moves."""
