"""Which queued rollout goes to which worker, in which order, and which move."""
