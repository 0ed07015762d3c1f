"""The connection to Redis: finding the server, talking to it, and what its refusals mean."""
