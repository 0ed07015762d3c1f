"""Converts records to messages and back."""
