"""Decides how much rollout work may run beside a serving engine without breaking its SLO."""
