"""Measures a gateway under thousands of open streams, and under a key that asks for a thousand completions at once."""
