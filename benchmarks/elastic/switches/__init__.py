"""Switches a real device between a trainer and an engine, under kills of all programs that take part."""
