"""Defines records, which are immutable, checked when parsed, and without behaviour beyond their own content."""
