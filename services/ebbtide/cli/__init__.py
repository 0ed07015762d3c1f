"""Implements the `ebbtide` command: commands, the screens that they show, and credentials."""
