"""Defines the subcommands of `ebbtide`."""
