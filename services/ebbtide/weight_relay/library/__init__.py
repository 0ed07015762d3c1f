"""The versions that a relay holds, on disk and in memory, and what it lets go."""
