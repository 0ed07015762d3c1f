"""The rollout-worker: one engine that generates, streams what it generated, and installs the versions it pulled."""
