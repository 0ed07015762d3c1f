"""The gateway under kills, beside vLLM's own server, and where it routes turns."""
