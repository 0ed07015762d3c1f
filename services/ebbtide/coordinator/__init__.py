"""Keeps runs and the rollout queue in the store, and assigns rollouts to workers."""
