"""The subcommands of `ebbtide`."""
