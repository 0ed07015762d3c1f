"""Connects to Redis: finds the server, talks to it, and turns its refusals into errors."""
