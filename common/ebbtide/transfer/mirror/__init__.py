"""The host's copy of a version: its bytes in shared memory, and how they change."""
