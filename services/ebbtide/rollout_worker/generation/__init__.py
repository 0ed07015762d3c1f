"""The rollouts that this worker generates, from assignment to durable response."""
