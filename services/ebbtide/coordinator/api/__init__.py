"""Answers the calls of clients and workers: each module has a service's checks, what it does, and its servicer."""
