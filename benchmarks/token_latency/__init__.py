"""How soon a token reaches its reader: from the engine to the SDK, for interactive and for batch rollouts."""
