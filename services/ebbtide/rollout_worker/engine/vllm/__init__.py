"""Runs vLLM as an engine: requests, steps under a budget, and memory."""
