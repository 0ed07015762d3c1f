"""Publishes policy versions: snapshots, encoding, ranks, and uploads to a relay."""
