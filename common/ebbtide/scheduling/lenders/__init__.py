"""Selects the serving hosts worth borrowing."""
