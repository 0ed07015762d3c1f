"""Reads files that people write, and tells everything that is wrong in one by file, line and column."""
