"""Prints what extras of Ebbtide require, for an environment that is to be laid out before its code is there.

`python extras.py coordinator relay`: the requirements of these extras and of Ebbtide itself, one a line.
`python extras.py --build`: what is needed to build it.
`python extras.py --pins`: `cpu.txt` as constraints (versions alone: pip takes hashes for full locks only).
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_NESTED = re.compile(r"ebbtide\[([a-z,]+)\]")


def requirements(project: dict[str, Any], extras: list[str]) -> Iterator[str]:
    """Each once, with those of extras that an extra names in its place. Raises `KeyError` for an unknown extra."""
    seen: dict[str, None] = dict.fromkeys(project["dependencies"])
    waiting = list(extras)
    while waiting:
        for text in project["optional-dependencies"][waiting.pop()]:
            if nested := _NESTED.fullmatch(text):
                waiting += nested[1].split(",")
            else:
                seen[text] = None
    yield from seen


def pins(lock: str) -> Iterator[str]:
    """`name==version` of every pin in a lock with hashes."""
    yield from re.findall(r"^([A-Za-z0-9._-]+==[^\s\\]+)", lock, flags=re.MULTILINE)


def main() -> None:
    pyproject = tomllib.loads((HERE.parent / "pyproject.toml").read_text())
    if sys.argv[1:] == ["--pins"]:
        lines = pins((HERE / "cpu.txt").read_text())
    elif sys.argv[1:] == ["--build"]:
        lines = iter(pyproject["build-system"]["requires"])
    else:
        lines = requirements(pyproject["project"], sys.argv[1:])
    sys.stdout.writelines(f"{line}\n" for line in lines)


if __name__ == "__main__":
    main()
