"""Reads each route's body into a request for text, and writes the answer in the route's own shape."""
