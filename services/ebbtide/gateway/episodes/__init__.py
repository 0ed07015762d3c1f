"""Sessions that are played: their turns, kept at the coordinator, and how they end."""
