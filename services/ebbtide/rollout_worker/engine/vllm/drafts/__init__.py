"""Drafts tokens of requests from what their groups made, for vLLM to verify."""
