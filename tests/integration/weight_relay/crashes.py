"""A process that ends before any one of its file operations."""

import os
from pathlib import Path
from typing import Any

import pytest


class Crash(BaseException):
    """The process ends here."""


class Crasher:
    """Ends the process before file operation number `at`, and each later one; a write cut short leaves half of its
    bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self._left = at
        self.log: list[str] = []
        write = Path.write_bytes
        for owner, name in ((Path, "rename"), (Path, "unlink"), (os, "fsync")):
            monkeypatch.setattr(owner, name, self._wrap(name, getattr(owner, name)))

        def write_bytes(path: Path, data: bytes) -> int:
            if self._left == 0:
                write(path, data[: len(data) // 2])
            self._count("write")
            return write(path, data)

        monkeypatch.setattr(Path, "write_bytes", write_bytes)

    @property
    def crashed(self) -> bool:
        return self._left == 0

    def _wrap(self, name: str, real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self._count(name)
            return real(*args, **options)

        return call

    def _count(self, name: str) -> None:
        if self._left == 0:
            raise Crash
        self._left -= 1
        self.log.append(name)
