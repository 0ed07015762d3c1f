"""Pulls, verifies and installs policy versions, and serves them to peers."""
