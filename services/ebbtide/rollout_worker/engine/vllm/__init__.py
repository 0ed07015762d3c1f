"""The vLLM engine: requests, steps under a budget, and memory."""
