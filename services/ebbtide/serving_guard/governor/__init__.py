"""Decides how much rollout work and memory may stand beside a serving engine: pure, without clock, store or I/O."""
