"""Keeps a host's copy of a version in shared memory, and changes it tile by tile."""
