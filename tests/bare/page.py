"""The commands of `docs/deploy/bare-metal.md`: its shell blocks whose first line is `# on HOST, HOST`."""

import re
from pathlib import Path
from typing import Final, NamedTuple

PAGE: Final = Path(__file__).parents[2] / "docs" / "deploy" / "bare-metal.md"
#: Where the commands of a checkout run; all others are hosts of the cluster.
ADMIN: Final = "admin"
_BLOCK: Final = re.compile(r"^```sh\n# on ([a-z, ]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """Commands, and the hosts on which they run."""

    hosts: tuple[str, ...]
    commands: str
    line: int


def blocks(text: str) -> list[Block]:
    """In their order."""
    return [
        Block(tuple(match[1].split(", ")), match[2], text.count("\n", 0, match.start()) + 1)
        for match in _BLOCK.finditer(text)
    ]
