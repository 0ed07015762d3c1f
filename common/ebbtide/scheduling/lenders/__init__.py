"""Decides which serving hosts are worth borrowing."""
