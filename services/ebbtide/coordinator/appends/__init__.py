"""Takes workers' tokens in: from a message to stored and acknowledged tokens."""
