"""Lends the device of a trainer to the rollout engines beside it, and takes it back when the trainer wants it."""
