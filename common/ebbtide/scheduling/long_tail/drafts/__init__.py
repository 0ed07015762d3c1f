"""Decides how long drafts of speculative decoding are, and whether an engine makes any."""
