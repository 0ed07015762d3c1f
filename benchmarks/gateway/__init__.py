"""The gateway under thousands of open streams, and beside a key that asks for a thousand completions at once."""
