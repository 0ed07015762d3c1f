"""Finds the example scenarios that come with the simulator."""

from pathlib import Path
from typing import Final

#: In a wheel beside this package; in a working copy where readers look for examples.
_FOLDERS: Final = (Path(__file__).parent / "examples", Path(__file__).parents[4] / "examples" / "scenarios")


def example_files() -> list[Path]:
    """Returns the scenario files, by name; none if they were left out of the installation."""
    folder = next((folder for folder in _FOLDERS if folder.is_dir()), None)
    return sorted(folder.glob("*.toml")) if folder else []
