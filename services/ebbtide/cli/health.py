"""Keeps the former path of `python -m ebbtide.cli.commands.health_command`."""

from ebbtide.cli.commands.health_command import main
from ebbtide.former_paths import warn_moved

warn_moved("ebbtide.cli.health", "ebbtide.cli.commands.health_command")

if __name__ == "__main__":
    main()
