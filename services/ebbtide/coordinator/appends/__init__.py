"""The append path: from a worker's message to stored and acknowledged tokens."""
