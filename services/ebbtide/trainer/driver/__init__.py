"""The former place of the episode driver."""
