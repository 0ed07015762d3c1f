"""Generates rollouts, from assignment to durable response."""
