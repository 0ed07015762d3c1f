"""Records what decisions were handed, and what was decided, so that a replay can take them again."""
