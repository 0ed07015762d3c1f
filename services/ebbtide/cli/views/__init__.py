"""Draws what the commands show: screens, tables, timelines."""
