"""A disk that stalls, for programs that start with its `environment` (slowsync.c)."""

import subprocess
from pathlib import Path
from typing import Final

from tests.fakes.clocks import compiler

_SOURCE: Final = Path(__file__).with_name("slowsync.c")


class StallingDisk:
    def __init__(self, directory: Path) -> None:
        """Compiles what the programs load, into `directory`. Needs `compiler()`."""
        self._stalled, self._library = directory / "stalled", directory / "slowsync.so"
        subprocess.run([compiler() or "cc", "-O1", "-shared", "-fPIC", "-o", self._library, _SOURCE], check=True)

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library), "EBBTIDE_SYNC_FILE": str(self._stalled)}

    def stall(self) -> None:
        """From now on no fdatasync ends, until `go_on`."""
        self._stalled.touch()

    def go_on(self) -> None:
        self._stalled.unlink()
