"""The table of clients: as a page shows it, and where it stands there."""

import platform
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

_BEGIN: Final = "<!-- Written by `make test-clients ARGS=--write`. -->"
_END: Final = "<!-- Until here. -->"

#: What failures tell of the machine that they were met on: addresses, hosts and paths.
_PLACES: Final = re.compile(
    r"\w+://\S+|\S+(?= is not on the loopback)|\b[\w.-]+:\d{2,5}\b|\b(?:\d{1,3}\.){3}\d{1,3}\b"
    r"|(?<![\w/])(?:/[\w.@+-]+){2,}/?"
)


class ClientRow(Struct, frozen=True, kw_only=True):
    """What one client did."""

    client: str
    version: str
    ran: str
    result: str
    right: bool
    installed: bool = True


def table(rows: Sequence[ClientRow]) -> str:
    """A table in Markdown. It tells nothing of this machine."""
    lines = ["| client | version | what was run | result |", "|---|---|---|---|"]
    for row in rows:
        cells = (row.client, row.version, row.ran, _PLACES.sub("...", row.result))
        lines.append(f"| {' | '.join(one.replace('|', '/').replace(chr(10), ' ') for one in cells)} |")
    return "\n".join(lines)


def write_table(page: Path, rows: Sequence[ClientRow]) -> None:
    """Replace the page's table. Raises `ValueError` if it has no place for it."""
    before, begin, rest = page.read_text().partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{page} lacks a line {_BEGIN} or {_END}")
    when = f"As run on {time.strftime('%Y-%m-%d')} with Python {platform.python_version()}."
    page.write_text(f"{before}{_BEGIN}\n{when}\n\n{table(rows)}\n{_END}{after}")
