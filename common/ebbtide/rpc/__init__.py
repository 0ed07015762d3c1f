"""Builds gRPC servers and channels, and maps errors to statuses."""
