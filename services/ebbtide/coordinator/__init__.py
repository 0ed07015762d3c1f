"""The coordinator: runs, the rollout queue, and who generates what; all of it in the store."""
