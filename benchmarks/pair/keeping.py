"""What was measured once and is not measured again: the engine's own speeds, and blocks.

Invariant: a file's name is made of all that its content depends on, the code of both engines' programs among it; what
was measured under anything else is never found.
"""

import hashlib
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from benchmarks.pair.results.figures import Block
from benchmarks.pair.traffic import Speeds

_ROOT: Final = Path(__file__).parents[2]
_CODE: Final = ("common/ebbtide", "services/ebbtide", "benchmarks/pair")
T = TypeVar("T")


class Keeping:
    """Below `folder`. `setting`: what all measurements have in common, besides the code. `found`: how many blocks were
    there."""

    def __init__(self, folder: Path, setting: dict[str, Any]) -> None:
        self._folder, self.found = folder, 0
        self._common = _digest([setting, code()])
        folder.mkdir(parents=True, exist_ok=True)

    def speeds(self) -> Speeds | None:
        """As probed when the first block was; arrivals follow from them, so they stay."""
        return self._read(self._speeds, Speeds)

    def keep_speeds(self, speeds: Speeds) -> None:
        self._speeds.write_bytes(msgspec.json.encode(speeds))

    def block(self, name: str, told: list[Any]) -> Block | None:
        block = self._read(self._block(name, told), Block)
        self.found += block is not None
        return block

    def keep_block(self, name: str, told: list[Any], block: Block) -> None:
        path = self._block(name, told)
        beside = path.with_suffix(".part")
        beside.write_bytes(msgspec.json.encode(block))
        beside.replace(path)

    @property
    def _speeds(self) -> Path:
        return self._folder / f"speeds-{self._common}.json"

    def _block(self, name: str, told: list[Any]) -> Path:
        return self._folder / f"{name.replace(':', '_')}-{_digest([self._common, told])}.json"

    def _read(self, path: Path, kind: type[T]) -> T | None:
        return msgspec.json.decode(path.read_bytes(), type=kind) if path.exists() else None


def code() -> str:
    """A digest of the sources that a measurement depends on."""
    digest = hashlib.blake2b(digest_size=8)
    for folder in _CODE:
        for path in sorted((_ROOT / folder).rglob("*.py")):
            digest.update(path.relative_to(_ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def _digest(told: Any) -> str:
    return hashlib.blake2b(msgspec.json.encode(told), digest_size=8).hexdigest()
