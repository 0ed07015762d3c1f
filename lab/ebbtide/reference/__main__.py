"""Writes the pages of docs/reference/ that the code defines: `python -m ebbtide.reference` in a checkout."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from ebbtide.reference import cli, gateway_fields, metrics, protocol, run_spec, scenarios, sdk, tracked_figures
from ebbtide.reference.registered_metrics import ROOT

FOLDER: Final = ROOT / "docs" / "reference"
PAGES: Final[dict[str, Callable[[], Iterator[str]]]] = {
    "run-spec.md": run_spec.page,
    "cli.md": cli.page,
    "scenarios.md": scenarios.page,
    "metrics.md": metrics.page,
    "protocol.md": protocol.page,
    "gateway-fields.md": gateway_fields.page,
    "sdk.md": sdk.page,
    "tracked-figures.md": tracked_figures.page,
}
_NOTE: Final = "<!-- Written by `make docs` from the code: change it there. -->"


def text(name: str) -> str:
    """The whole text of a page."""
    return "\n".join([_NOTE, "", *PAGES[name]()]).rstrip("\n") + "\n"


def main(folder: Path = FOLDER) -> None:
    """Write all pages into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in PAGES:
        (folder / name).write_text(text(name))


if __name__ == "__main__":
    main()
