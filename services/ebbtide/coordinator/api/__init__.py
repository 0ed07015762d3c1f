"""Answers clients' calls on runs, rollouts and leases, and checks their requests."""
