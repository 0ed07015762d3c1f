"""Reads scenarios from TOML files, and refuses what is wrong with its place and a remedy."""
