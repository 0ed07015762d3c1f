"""Decides how much of a response an engine is given memory for at a time, and which responses wait for memory."""
