"""Counts how often vLLM's scheduler takes a request's memory, across its process and the worker's.

vLLM's own count is in statistics that cost time for each token, so they are off. Invariant: the file has one number,
which only the scheduler's process writes. Lost with the worker.
"""

import mmap
import os
import tempfile
from pathlib import Path
from typing import Final

#: Names the file to the engine's process.
_FILE: Final = "EBBTIDE_PREEMPTION_COUNT"
_BYTES: Final = 8


class PreemptionCount:
    """One end of the count."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _BYTES)

    @classmethod
    def made(cls) -> "PreemptionCount":
        """A new count, for the engine that starts next."""
        handle, name = tempfile.mkstemp(prefix="ebbtide-preemptions-")
        with os.fdopen(handle, "wb") as file:
            file.write(bytes(_BYTES))
        os.environ[_FILE] = name
        return cls(Path(name))

    @classmethod
    def inherited(cls) -> "PreemptionCount | None":
        """The worker's count, in an engine's process; None below no worker."""
        name = os.environ.get(_FILE)
        return cls(Path(name)) if name and Path(name).exists() else None

    @property
    def value(self) -> int:
        return int.from_bytes(self._map[:], "little")

    def add(self) -> None:
        self._map[:] = (self.value + 1).to_bytes(_BYTES, "little")

    def remove(self) -> None:
        """The engine has ended."""
        self._path.unlink(missing_ok=True)
