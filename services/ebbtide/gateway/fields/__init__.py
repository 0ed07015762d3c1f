"""States for each route which fields are supported, accepted without effect, and refused.

This is the only place that says so: requests are checked against it, and the tables of docs/gateway.md are made of it.
"""
